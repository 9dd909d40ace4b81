"""The benchmarks a user runs on his own machine (`ggufd bench ...`), and the record they write."""
