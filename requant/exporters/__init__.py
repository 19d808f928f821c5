"""Export of checkpoints to formats that other programs read without requant: one file per target, chosen by `export.py`.
(The folder is not called `export`, which is the name of the public function.)"""
