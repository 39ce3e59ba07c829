"""`runnerscope bench`: this engine against a peer, on the same weights, in the same run, judged by its own spread."""
