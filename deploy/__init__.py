"""Configuration of what runs around shoal; and the small programs that make and check it."""
