"""Prompts of our own for parity: code, prose, chat, lists, languages, numbers, whitespace, emoji, short and long."""

from __future__ import annotations

LONG = (
    "The lighthouse keeper wrote in his log every evening, and the entries grew shorter as the winter went on. In"
    " October he noted the wind, the height of the waves, the ships that passed and the birds that rested on the "
    "railing. In November he noted the wind and the ships. In December he noted only the wind. On the first day "
    "of January he wrote that the lamp had gone out at three in the morning, that he had climbed the stairs in "
    "the dark, and that at the top he had found the window open and a gull asleep on the warm glass. He did not "
    "know whether to wake it. He lit the second lamp instead, which nobody had used for twenty years, and it "
    "burned with a yellow light that a captain on the way to Bergen took for the moon. The captain wrote to the "
    "harbour office, and the office sent an inspector, who arrived in March with a notebook, a ladder and a list "
    "of questions, of which the first was how a gull could have opened a window that had been painted shut, and "
    "the"
)

TEXTS = (
    "Once upon a time, in a village by the sea,",
    "The capital of France is",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    'import numpy as np\n\n\ndef softmax(x: np.ndarray) -> np.ndarray:\n    """Numerically stable."""\n',
    "SELECT name, COUNT(*) FROM orders JOIN customers ON",
    "#include <stdio.h>\n\nint main(void) {\n    for (int i = 0; i < 10; i++) {",
    "Shopping list:\n- eggs\n- flour\n- butter\n-",
    "1. Mercury\n2. Venus\n3. Earth\n4.",
    "Les trois mousquetaires étaient en réalité",
    "Der Zug nach München fährt heute leider",
    "El perro de San Roque no tiene rabo porque",
    "東京は日本の首都であり、",
    "Москва — столица",
    "1, 1, 2, 3, 5, 8, 13, 21,",
    "3.14159265358979 is approximately",
    '{"name": "Ada", "born": 1815, "languages": ["English",',
    "<html>\n  <body>\n    <h1>Hello</h1>\n    <img src=x onerror=alert(1)>",
    "   \n\n\t  indented and alone",
    "🚀🌍🎉 The launch was",
    "Yes",
    "a",
    "Q: What is heavier, a kilogram of feathers or a kilogram of lead?\nA:",
    "To whom it may concern,\n\nI am writing to complain about the",
    "The derivative of sin(x) is cos(x), and the derivative of cos(x) is",
    "Ingredients: 200 g sugar, 3 eggs, a pinch of salt. Method: first,",
    LONG,
)

CHATS = (
    [{"role": "user", "content": "What is the difference between a list and a tuple in Python?"}],
    [
        {"role": "system", "content": "You answer in one short sentence."},
        {"role": "user", "content": "Why is the sky blue?"},
        {"role": "assistant", "content": "Because air scatters blue light more than red."},
        {"role": "user", "content": "And why is it red at sunset?"},
    ],
    [{"role": "user", "content": "Write a haiku about a slow computer."}],
)
