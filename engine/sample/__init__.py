"""What both runners share of sampling: filters on logits, and logprobs."""
