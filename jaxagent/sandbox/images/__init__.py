"""Images without a registry: Dockerfiles, apptainer definitions, exported tars and debootstrap, kept as layers.

    recipe text      `dockerfile`, `definition`   ->  instructions, checked before anything runs
    `build.Steps`    runs each once in a sandbox, keeps what it changed in a `store.Store`, and gives a `built.Built`
    `bases`          what FROM may name: this machine's /usr, a debootstrap root, a folder, an OCI tar
    `many`           a whole dataset's; where docker or podman works, they build

Section "Images" of docs/sandboxes.md says what is supported; `python -m jaxagent.sandbox.images --help` is the command.
"""
