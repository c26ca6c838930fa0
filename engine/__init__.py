"""What prefill and decode workers share: scheduling (torch-free) and the model runner (torch)."""
