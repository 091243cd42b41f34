"""Generated traces with known truth: what the advice is judged by."""
