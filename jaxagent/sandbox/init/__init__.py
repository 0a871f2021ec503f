"""The program that runs in a sandbox as its process 1, in Python: for hosts and images without a C compiler.

It does what `native/` does in C, and starts as an archive of this folder alone (`init_program.write_archive`), so no
module here imports another part of jaxagent. Nothing may be imported after the root has changed, so every import stands
at the top.
"""
