"""Twenty prompts of all kinds: ten conversations and ten plain texts."""

from __future__ import annotations

CHATS: tuple[tuple[dict[str, str], ...], ...] = (
    ({"role": "user", "content": "What is the capital of France?"},),
    ({"role": "system", "content": "You answer in one short sentence."},
     {"role": "user", "content": "Why is the sky blue?"}),
    ({"role": "user", "content": "用中文介绍一下北京。"},),
    ({"role": "user", "content": "Tell me a story about a 🐙 and a 🦀 in the sea 🌊."},),
    ({"role": "user", "content": "Write a Python function that reverses a list."},),
    ({"role": "user", "content": "My name is Ada."},
     {"role": "assistant", "content": "Hello Ada, how can I help?"},
     {"role": "user", "content": "What is my name?"}),
    ({"role": "user", "content": "List three primes greater than ten."},),
    ({"role": "user", "content": "Translate 'good morning' into French and Japanese (日本語)."},),
    ({"role": "user", "content": "def f(x):\n    return x *\n\nWhat is wrong with this code?"},),
    ({"role": "user", "content": "   Leading spaces,\ttabs\nand newlines.\n\n"},),
)

PLAIN: tuple[str, ...] = (
    "Once upon a time, in a small village by the sea,",
    "The three laws of thermodynamics are",
    "机器学习是人工智能的一个分支，",
    "今日の天気は",
    "🙂🌶️👩‍👩‍👧 emoji are",
    "def fibonacci(n):\n    ",
    "#include <stdio.h>\nint main(void) {",
    "SELECT name, count(*) FROM orders WHERE",
    "Naïve café — “quotes” and ½ fractions:",
    "1, 1, 2, 3, 5, 8, 13,",
)
