"""From the sources in torch-ext to the kernel repository on the Hub, and back into a process.

- project.py: build.toml, read with the reader of `kernels`
- variants.py, assemble.py, build.py: what is built, and the bytes of it
- source_rules.py, python39.py: what shipped Python may contain
- subject.py, repository_rules.py, probe.py, check.py: every rule of a kernel repository, as a table
- publish.py: the branches on the Hub, what would change there, and the change
- download.py, loading.py: the way back, into the cache and into this process
"""
