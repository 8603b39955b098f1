"""Prose of the embedded corpus: portraits, towns, letters, dialogues, stories, and the skills told as text."""
