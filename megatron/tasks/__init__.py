"""Evaluations and finetuning: tasks/main.py at the top level starts them.

main.py      the command line; flags.py: the tasks' own flags
run.py       one task, with a run log around it
zeroshot.py  language models scored as they are: WIKITEXT103, LAMBADA
finetune.py  a pretrained encoder learns to judge texts, by epochs
glue.py      the tasks of GLUE; race.py: RACE
texts.py     labelled texts as samples of ids
"""
