"""What the gateway and its tokenizer cost, beside what they are compared with."""
