"""Parts that several model families share: configuration fields, checks, planning shapes, Megatron specs."""
