"""How the model is trained: the engine, its parts, and one thin script for each stage."""
