"""The interlaced pipeline against the best plans without it: mBART with a large vocabulary, small and at full size.

Small: four ranks, a vocabulary whose embedding and head are half of the parameters and of the work. The tied embedding
of a pipeline is on two groups, which exchange it and its gradient every step; tensor and data parallel move activations
or gradients of everything. Large: the sizes of SuperScaler's own run on 32 V100 (`where`), with language modelling's
head, which that code leaves out, and hidden 5120: Hugging Face's heads are as wide as the model, that code's are not,
and with 6144 the model would have half as many parameters more than theirs.
"""

from benchmarks.space_time_cases import Case, Large, Small

_SMALL = (
    "mbart-large?vocab_size=16384&d_model=128&encoder_layers=2&decoder_layers=2&encoder_ffn_dim=512&decoder_ffn_dim=512"
    "&encoder_attention_heads=4&decoder_attention_heads=4&max_position_embeddings=64&seq=32&batch=16&dropout=0"
    "&dtype=float32"
)
_LARGE = (
    "mbart-large?vocab_size=500000&d_model=5120&encoder_layers=48&decoder_layers=48&encoder_ffn_dim=20480"
    "&decoder_ffn_dim=20480&encoder_attention_heads=32&decoder_attention_heads=32&max_position_embeddings=1024"
    "&seq=1024&batch=256&dropout=0&dtype=float32"
)

INTERLACED = Case(
    feature="interlaced",
    needs_ratio=True,
    small=Small(
        source=_SMALL,
        topology="flat-of-4",
        plans=("interlaced:pp=4,micro=4", "interlaced:pp=4,micro=8"),
        others=(
            "pp=4,micro=4,1f1b",
            "pp=2,tp=2,vocab,micro=2,1f1b",
            "pp=2,tp=2,vocab,micro=4,1f1b",
            "dp=2,tp=2,vocab",
            "tp=4,vocab",
            "dp=4,zero1",
        ),
    ),
    large=Large(
        source=_LARGE,
        cluster="dgx-v100",
        nodes=4,
        plans=("interlaced:pp=16,tp=2,micro=256,recompute", "interlaced:pp=8,tp=4,micro=256,recompute"),
        others=(
            "tp=32,vocab,micro=256,recompute",
            "pp=2,tp=16,vocab,micro=256,1f1b,recompute",
            "pp=4,tp=8,vocab,micro=256,1f1b,recompute",
            "pp=8,tp=4,vocab,micro=256,1f1b,recompute",
            "pp=16,tp=2,vocab,micro=256,1f1b,recompute",
            "pp=32,micro=256,1f1b,recompute",
        ),
        where="msrasys/nnscaler@253b41908f40, handcraft/mbart/test-4node-fp32.sh and train.py: 48 + 48 layers, hidden "
        "5120 and 6144, 32 heads, vocabulary 500,000, 256 micro-batches of one, float32, 4 × 8 V100-32GB",
    ),
)
