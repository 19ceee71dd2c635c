"""The command line: arguments in, a function call, text or a file out."""
