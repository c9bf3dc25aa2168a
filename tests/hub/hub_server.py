"""A Hugging Face Hub in memory, on the loopback interface: what kernel repositories need of it, and faults on demand.

with serve(trusted=["qwen"]) as hub:
    HfApi(endpoint=hub.url, token="hf_test").create_repo("qwen/flashqla", repo_type="kernel")
"""

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit

LFS_SUFFIXES = (".so", ".cubin", ".bin")
REPO = r"(?P<repo>[^/]+/[^/]+)"


class File(NamedTuple):
    """A file of one commit; large ones are stored apart and known by their SHA-256."""

    content: bytes
    is_lfs: bool = False

    @property
    def blob_id(self) -> str:
        return hashlib.sha1(b"blob %d\0" % len(self.content) + self.content).hexdigest()

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.content).hexdigest()


@dataclass
class Repository:
    """Branches that point to commits; a commit is {path: File}."""

    branches: dict[str, str] = field(default_factory=dict)
    commits: dict[str, dict[str, File]] = field(default_factory=dict)

    def commit(self, branch: str, files: dict[str, File]) -> str:
        content = json.dumps([len(self.commits), branch, sorted((path, file.sha256) for path, file in files.items())])
        sha = hashlib.sha1(content.encode()).hexdigest()
        self.commits[sha] = files
        self.branches[branch] = sha
        return sha

    def resolve(self, revision: str) -> str | None:
        revision = revision.removeprefix("refs/heads/")
        return self.branches.get(revision, revision if revision in self.commits else None)

    def files(self, revision: str) -> dict[str, bytes]:
        """{path: content} of a branch or commit."""
        return {path: file.content for path, file in self.commits[self.resolve(revision)].items()}


class Change(NamedTuple):
    """One commit that a client made."""

    branch: str
    uploaded: tuple[str, ...]
    deleted: tuple[str, ...]


@dataclass
class Fault:
    """Answer the next `times` requests that match `route` ("METHOD /path") with an error."""

    route: str
    status: int
    message: str
    times: int


@dataclass
class Hub:
    """Everything the server knows, for tests to read and to disturb."""

    url: str = ""
    trusted: set[str] = field(default_factory=set)
    repositories: dict[str, Repository] = field(default_factory=dict)
    large_files: dict[str, bytes] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)

    def fail(self, route: str, status: int, message: str = "injected", times: int = 10**6) -> None:
        self.faults.append(Fault(route, status, message, times))

    def heal(self) -> None:
        self.faults.clear()


class Answer(Exception):
    """Ends the handling of a request."""

    def __init__(
        self, status: int, body: object = None, headers: dict[str, str] | None = None, raw: bytes | None = None
    ):
        super().__init__(status)
        self.status = status
        self.content = json.dumps(body if body is not None else {}).encode() if raw is None else raw
        self.headers = headers or {}


def not_found(code: str, message: str, **headers: str) -> Answer:
    return Answer(404, {"error": message}, {"X-Error-Code": code, "X-Error-Message": message, **headers})


class Request(BaseHTTPRequestHandler):
    """One request; `ROUTES` names the method that answers it."""

    protocol_version = "HTTP/1.1"
    wbufsize = -1  # head and body in one packet; apart, each answer waits 40 ms for the client's acknowledgement
    disable_nagle_algorithm = True
    hub: Hub

    def log_message(self, format: str, *args: object) -> None:
        """Stay quiet: the tests read Hub.requests."""

    def answer(self) -> None:
        self.body = self._read_body()
        path = urlsplit(self.path).path
        self.hub.requests.append(f"{self.command} {path}")
        try:
            self._inject_fault(path)
            self._dispatch(path)
        except Answer as answer:
            self._send(answer)

    do_GET = do_HEAD = do_POST = do_PUT = answer

    def _dispatch(self, path: str) -> None:
        for route, name in ROUTES.items():
            if match := re.fullmatch(route, path):
                raise getattr(self, name)(**{key: unquote(value or "") for key, value in match.groupdict().items()})
        raise Answer(501, {"error": f"the test server has no route for {self.command} {path}"})

    def _inject_fault(self, path: str) -> None:
        for fault in self.hub.faults:
            if fault.times > 0 and re.search(fault.route, f"{self.command} {path}"):
                fault.times -= 1
                message = fault.message.format(authorization=self.headers.get("Authorization", ""))
                raise Answer(fault.status, {"error": message}, {"X-Error-Message": message})

    def _read_body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        chunks = []
        while size := int(self.rfile.readline(), 16):
            chunks.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(chunks)

    def _send(self, answer: Answer) -> None:
        self.send_response(answer.status)
        length = {"Content-Type": "application/json", "Content-Length": str(len(answer.content))}
        for name, value in {**length, **answer.headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.content)

    def _repository(self, repo: str) -> Repository:
        if repo not in self.hub.repositories:
            raise not_found("RepoNotFound", "Repository not found")
        return self.hub.repositories[repo]

    def _commit(self, repo: str, revision: str) -> tuple[str, dict[str, File]]:
        repository = self._repository(repo)
        sha = repository.resolve(revision)
        if sha is None:
            raise not_found("RevisionNotFound", f"Invalid rev id: {revision}")
        return sha, repository.commits[sha]

    def whoami(self) -> Answer:
        return Answer(200, {"type": "user", "name": "tester", "orgs": [{"name": "qwen"}]})

    def validate_card(self) -> Answer:
        return Answer(200, {"errors": [], "warnings": []})

    def organization(self, name: str) -> Answer:
        trust = {"trustedKernelPublisher": True} if name in self.hub.trusted else {}
        return Answer(200, {"name": name, "fullname": name, "avatarUrl": "", **trust})

    def create_repo(self) -> Answer:
        wanted = json.loads(self.body)
        repo = f"{wanted.get('organization', 'tester')}/{wanted['name']}"
        answer = {"url": f"{self.hub.url}/kernels/{repo}", "name": repo, "id": "1"}
        if wanted.get("type") != "kernel":
            return Answer(400, {"error": "this server keeps kernel repositories only"})
        if repo in self.hub.repositories:
            return Answer(409, {**answer, "error": "You already created this repo"})
        repository = self.hub.repositories[repo] = Repository()
        repository.commit("main", {".gitattributes": File(b"*.so filter=lfs diff=lfs merge=lfs -text\n")})
        return Answer(200, answer)

    def create_branch(self, repo: str, branch: str) -> Answer:
        repository = self._repository(repo)
        if branch in repository.branches:
            return Answer(409, {"error": "Reference already exists"})
        start = json.loads(self.body or b"{}").get("startingPoint") or "main"
        repository.branches[branch] = repository.resolve(start)
        return Answer(200)

    def preupload(self, repo: str, revision: str) -> Answer:
        self._commit(repo, revision)
        files = [
            {"path": file["path"], "uploadMode": mode_of(file["path"]), "shouldIgnore": False, "oid": None}
            for file in json.loads(self.body)["files"]
        ]
        return Answer(200, {"files": files})

    def large_file_batch(self, repo: str) -> Answer:
        objects = []
        for wanted in json.loads(self.body)["objects"]:
            upload = {"href": f"{self.hub.url}/large-files/{wanted['oid']}", "header": {}}
            known = wanted["oid"] in self.hub.large_files
            objects.append({**wanted, **({} if known else {"actions": {"upload": upload}})})
        return Answer(200, {"transfer": "basic", "objects": objects})

    def put_large_file(self, oid: str) -> Answer:
        self.hub.large_files[oid] = self.body
        return Answer(200)

    def commit(self, repo: str, revision: str) -> Answer:
        sha, present = self._commit(repo, revision)
        lines = [json.loads(line) for line in self.body.splitlines() if line.strip()]
        header = next(line["value"] for line in lines if line["key"] == "header")
        if header.get("parentCommit") not in (None, sha):
            return Answer(412, {"error": "A commit has happened since"})
        files, uploaded, deleted = dict(present), [], []
        for line in lines:
            path = line["value"].get("path")
            if line["key"] == "file":
                files[path] = File(base64.b64decode(line["value"]["content"]))
            elif line["key"] == "lfsFile":
                files[path] = File(self.hub.large_files[line["value"]["oid"]], is_lfs=True)
            elif line["key"] == "deletedFile":
                del files[path]
            (uploaded if line["key"] in ("file", "lfsFile") else deleted).append(path)
        new = self._repository(repo).commit(revision, files)
        self.hub.changes.append(Change(revision, tuple(uploaded), tuple(path for path in deleted if path)))
        return Answer(
            200, {"success": True, "commitOid": new, "commitUrl": f"{self.hub.url}/kernels/{repo}/commit/{new}"}
        )

    def refs(self, repo: str) -> Answer:
        branches = self._repository(repo).branches.items()
        listed = [{"name": name, "ref": f"refs/heads/{name}", "targetCommit": sha} for name, sha in branches]
        return Answer(200, {"branches": listed, "tags": [], "converts": []})

    def info(self, repo: str, revision: str = "main") -> Answer:
        sha, files = self._commit(repo, revision or "main")
        return Answer(
            200, {"id": repo, "sha": sha, "private": False, "siblings": [{"rfilename": path} for path in files]}
        )

    def tree(self, repo: str, revision: str, folder: str) -> Answer:
        _, files = self._commit(repo, revision)
        recursive = parse_qs(urlsplit(self.path).query).get("recursive", ["false"])[0].lower() in ("true", "1")
        prefix = f"{folder}/" if folder else ""
        inside = {path: file for path, file in sorted(files.items()) if path.startswith(prefix)}
        if folder and not inside:
            raise not_found("EntryNotFound", f"{folder} does not exist on {revision}")
        return Answer(200, list(tree_entries(inside, prefix, recursive)))

    def resolve(self, repo: str, revision: str, path: str) -> Answer:
        sha, files = self._commit(repo, revision)
        if path not in files:
            raise not_found("EntryNotFound", "Entry not found", **{"X-Repo-Commit": sha})
        file = files[path]
        headers = {"X-Repo-Commit": sha, "ETag": f'"{file.sha256 if file.is_lfs else file.blob_id}"'}
        if file.is_lfs:
            headers |= {"X-Linked-Etag": headers["ETag"], "X-Linked-Size": str(len(file.content))}
        return Answer(200, headers=headers, raw=file.content)


ROUTES = {
    r"/api/whoami-v2": "whoami",
    r"/api/validate-yaml": "validate_card",
    r"/api/organizations/(?P<name>[^/]+)/overview": "organization",
    r"/api/repos/create": "create_repo",
    r"/large-files/(?P<oid>[0-9a-f]{64})": "put_large_file",
    rf"/kernels/{REPO}\.git/info/lfs/objects/batch": "large_file_batch",
    rf"/kernels/{REPO}/resolve/(?P<revision>[^/]+)/(?P<path>.+)": "resolve",
    rf"/api/kernels/{REPO}": "info",
    rf"/api/kernels/{REPO}/revision/(?P<revision>[^/]+)": "info",
    rf"/api/kernels/{REPO}/refs": "refs",
    rf"/api/kernels/{REPO}/branch/(?P<branch>[^/]+)": "create_branch",
    rf"/api/kernels/{REPO}/preupload/(?P<revision>[^/]+)": "preupload",
    rf"/api/kernels/{REPO}/commit/(?P<revision>[^/]+)": "commit",
    rf"/api/kernels/{REPO}/tree/(?P<revision>[^/]+)(?:/(?P<folder>.+))?": "tree",
}


def mode_of(path: str) -> str:
    return "lfs" if path.endswith(LFS_SUFFIXES) else "regular"


def tree_entries(files: dict[str, File], prefix: str, recursive: bool) -> Iterator[dict]:
    """The Hub's listing of `files` below `prefix`: folders, then what lies in them."""
    folders = set()
    for path, file in files.items():
        parts = path.removeprefix(prefix).split("/")
        for depth in range(1, len(parts) if recursive else min(len(parts), 2)):
            folder = prefix + "/".join(parts[:depth])
            if folder not in folders:
                folders.add(folder)
                yield {"type": "directory", "path": folder, "oid": hashlib.sha1(folder.encode()).hexdigest(), "size": 0}
        if recursive or len(parts) == 1:
            size = len(file.content)
            lfs = {"lfs": {"oid": file.sha256, "size": size, "pointerSize": 130}} if file.is_lfs else {}
            yield {"type": "file", "path": path, "oid": file.blob_id, "size": size, **lfs}


@contextmanager
def serve(trusted: tuple[str, ...] = ()) -> Iterator[Hub]:
    """Run a Hub on a free port of the loopback interface for the length of the block."""
    hub = Hub(trusted=set(trusted))
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("HubRequest", (Request,), {"hub": hub}))
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
