"""Programs of all families, meshes and machines, compiled and compared with what they need.

A cell is one program of one family on one mesh of one machine. `programs` lowers it, `counts` reads
what its compiled program does, `needs` says what it must do, and `python -m tests.compilers.grid`
does this for all cells and goes on where it was interrupted.
"""
