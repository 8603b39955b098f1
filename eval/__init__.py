"""Measuring: bits per byte, scored questions, and the report over every stage."""
