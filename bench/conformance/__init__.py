"""Where plugins' own tests, written by earlier versions of `leakbench new`, find conformance."""
