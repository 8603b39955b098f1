"""What stands around training: the tokenizer, mid-training, chat, export."""
