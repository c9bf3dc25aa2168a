# A development shell, and nothing more: `nix develop` gives Python 3.11 and git, and the libraries that wheels from PyPI
# expect on a system without /lib64. It cannot build the kernel by kernel-builder, which compiles CUDA sources, while the
# kernels here are TileLang: `make build` assembles build/ with compilers from PyPI, and needs g++ and make. The shell pins no revision of nixpkgs until a
# flake.lock is committed, so tests do not depend on it.
{
  description = "Development shell of FlashQLA on the Hub";

  inputs.nixpkgs.url = "github:NixOS/nixpkgs/nixos-unstable";

  outputs = { self, nixpkgs }:
    let
      systems = [ "x86_64-linux" "aarch64-linux" ];
      shellFor = system:
        let pkgs = nixpkgs.legacyPackages.${system};
        in pkgs.mkShell {
          packages = [ pkgs.python311 pkgs.git pkgs.gcc pkgs.gnumake ];
          LD_LIBRARY_PATH = pkgs.lib.makeLibraryPath [ pkgs.stdenv.cc.cc.lib pkgs.zlib ];
          shellHook = ''
            test -d .venv || python -m venv .venv
            . .venv/bin/activate
            echo "First time: pip install -e '.[transformers,dev]'"
          '';
        };
    in {
      devShells = nixpkgs.lib.genAttrs systems (system: { default = shellFor system; });
    };
}
