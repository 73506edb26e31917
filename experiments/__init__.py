"""One file, one question; run with python -m experiments.NAME from a checkout."""
