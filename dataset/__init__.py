"""What the model is trained on: rows, chats, packing, order, tools and the embedded corpus."""
