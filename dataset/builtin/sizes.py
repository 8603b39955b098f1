"""How much of each file there is, and why. All counts are of rows; languages take turns.

The default model (about 5M parameters, vocabulary 6,400) reads some 2,500 to 4,000 tokens a second on two CPU cores,
so a quarter of an hour pays for about 3 million tokens in all. A text has about 70 tokens, a plain conversation about
45, one with tools about 200.
"""

PRETRAIN_ROWS = 19000  # about 1.3M tokens: each fact of the world is told about 150 times in each language
PRETRAIN_VALIDATION_ROWS = 400

MIDTRAIN_TEXT_ROWS = 4400  # about 0.35M tokens of denser text: questions with answers, reasoning, transcripts
MIDTRAIN_CHAT_ROWS = 5600  # about 0.35M tokens of conversations
MIDTRAIN_VALIDATION_TEXT_ROWS = 120
MIDTRAIN_VALIDATION_CHAT_ROWS = 160

SFT_ROWS = 13000  # about 0.8M tokens
SFT_VALIDATION_ROWS = 400

PREFERENCE_ROWS = 2000
PREFERENCE_VALIDATION_ROWS = 400
PROMPT_ROWS = 2000
PROMPT_VALIDATION_ROWS = 400

TEST_QUESTIONS = 120  # for each family and language: more than the 100 that a score is asked for
VALIDATION_QUESTIONS = 40
LARGEST_CONSTANT_SHARE = 0.30  # of a family's questions that one and the same reply may answer
