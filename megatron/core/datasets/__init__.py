"""Ids to samples. numpy only, so that tools start quickly; `samplers.py` alone needs torch.

    text --tools/preprocess_data.py--> PREFIX.bin + PREFIX.idx --GPTDataset--> token windows --sampler--> micro batches

files      storage (local or remote), indexed (the .bin/.idx pair), sidecar (PREFIX.json), bin_idx_check, index_map (caches)
text       text_kinds, gpt (token windows), fim, continued_text
sentences  sentence_kinds, sentence_map, masking, bert, t5 (sentences with hidden words)
chats      conversations (JSONL to ids), conversation_rows, segment_encoder, packing, chat
templates  templates, answer_spans, message_content, template_sandbox and the process template_worker
images     images, image_conversations, multimodal, multimodal_bin_idx, energon and webdataset, image_folder
a run      data_splits (the settings), kinds (which samples each network reads), blend and blend_index (mixed datasets), samplers, mock
shared     dataset_protocols (what every kind of data set offers), special_tokens
"""
