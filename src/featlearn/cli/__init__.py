"""The command `featlearn`: parses arguments and calls the library.

A command is a function whose keyword-only parameters are its options. It prints nothing: it returns an `Answer`, and
`app.main` prints that as text or, with --json, as one JSON document. Modules that hold a command import neither torch
nor numpy as they load, for --help to be quick.
"""
