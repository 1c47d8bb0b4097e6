"""What a trained language model is asked by others: log-likelihoods of continuations, and lm-evaluation-harness.

likelihood.py         how likely ids are after ids, and how they go on, under any layout
harness.py            lm-evaluation-harness's model `megatron`
plugin.py             names that model to lm-evaluation-harness when its own command line starts
reward_model.py       what a reward model says of texts
vision_benchmarks.py  benchmarks of language models that see: files, questions, scores
vision_metrics.py     scores of answers about images; vqa_accuracy.py, mmmu_answers.py and caption_tokens.py: the official rules
online.py             such a benchmark at every evaluation of a training run
"""
