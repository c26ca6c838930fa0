"""`shoal bench serve`: load from a process of its own against any endpoint that speaks the OpenAI API."""
