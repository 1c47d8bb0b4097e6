"""Evaluations and finetuning: tasks/main.py at the top level starts them."""
