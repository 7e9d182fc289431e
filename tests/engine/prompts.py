"""Twenty prompts of different kinds and lengths for the comparison with transformers."""

PROMPTS = [
    "Once upon a time",
    "The capital of Italy is",
    "def fibonacci(n):\n",
    "Dear Sir or Madam,",
    "2, 4, 6, 8,",
    "Water boils at a temperature of",
    "In 1969, the first humans",
    "A recipe for pancakes: take two cups of flour,",
    "Question: Why is the sky blue?\nAnswer:",
    "The quick brown fox",
    "Il était une fois",
    "Die Hauptstadt von Deutschland ist",
    "SELECT name FROM users WHERE",
    "My favourite book is about",
    "To be, or not to be",
    "# Introduction\n\nMachine learning is",
    "Alice: How are you today?\nBob:",
    "The three primary colours are",
    "Photosynthesis is the process by which plants",
    "She opened the old wooden door, took a deep breath, and saw that the whole room behind it was filled with",
]
