"""How much of each file there is, and why. All counts are of rows; languages take turns.

The default model (about 5M parameters) reads some 11,000 tokens a second on two CPU cores, so ten minutes pay for
about 6.5 million tokens in all. A text has about 50 tokens, a plain conversation about 45, one with tools about 200.
More rows serve better than more passes: 13,000 conversations twice ended at a training loss of 0.07 and a validation
loss of 0.13.
"""

PRETRAIN_ROWS = 52000  # about 2.5M tokens
PRETRAIN_VALIDATION_ROWS = 400

# Prose as in pretraining, denser texts (questions with answers, reasoning, transcripts), conversations. Without the
# prose, bits per byte of the pretraining text rose from 0.37 to 0.78 while those of conversations fell.
MIDTRAIN_ROWS = (6000, 5000, 12000)  # about 0.3M, 0.35M and 0.6M tokens
MIDTRAIN_VALIDATION_ROWS = (100, 100, 160)

SFT_ROWS = 52000  # about 2.5M tokens: with half of them the loss was still falling fast at the end
SFT_VALIDATION_ROWS = 400

PREFERENCE_ROWS = 3000
PREFERENCE_VALIDATION_ROWS = 600
PROMPT_ROWS = 3000  # four in eleven are sums without a tool
PROMPT_VALIDATION_ROWS = 800

TEST_QUESTIONS = 120  # for each family and language: more than the 100 that a score is asked for
VALIDATION_QUESTIONS = 40
LARGEST_CONSTANT_SHARE = 0.28  # of a family's questions that one and the same reply may answer
