"""The command `featlearn`: parses arguments and calls the library.

A command is a function whose keyword-only parameters are its options. It prints nothing: it returns an `Answer`, which
`app.main` prints as text or, with --json, as one JSON document. Modules with a command do not import torch or numpy at
load time, so that --help is fast.
"""
