"""What both runners share of sampling: parameters made ready, filters on logits, grammars, logprobs."""
