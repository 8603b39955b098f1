"""The question families, grouped by what they need: facts, words, numbers, time, context, tools."""
