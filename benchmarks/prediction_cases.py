"""The cases of `prediction_testbed`: topologies, models and plans, small enough for shares of one machine."""

from dataclasses import dataclass

CLUSTERS = "testbed/clusters"

GPT = (
    "gpt2?n_layer=4&n_embd=256&n_head=8&vocab_size=2048&seq=128&batch=16&dtype=float32"
    "&attn_pdrop=0&embd_pdrop=0&resid_pdrop=0"
)
LLAMA = (
    "llama3-8b?num_hidden_layers=4&hidden_size=256&intermediate_size=704&num_attention_heads=8&num_key_value_heads=4"
    "&vocab_size=2048&seq=128&batch=16&dtype=float32"
)
MOE = (
    "mixtral-8x7b?num_hidden_layers=2&hidden_size=192&intermediate_size=384&num_attention_heads=8&num_key_value_heads=4"
    "&num_local_experts=4&vocab_size=2048&seq=128&batch=16&dtype=float32"
)
MODELS = {"GPT": GPT, "Llama": LLAMA, "MoE": MOE}

FLAT_PLANS = (
    "dp=4",
    "dp=4,zero1",
    "dp=4,zero3",
    "tp=4,vocab",
    "tp=2,tp2=2,vocab",
    "dp=2,tp=2,vocab",
    "pp=2,dp=2,micro=4,1f1b",
    "pp=4,micro=8,1f1b",
    "pp=4,micro=4,gpipe",
)
LEVEL_PLANS = (
    "dp=4",
    "dp=4,zero1",
    "dp=4,zero3",
    "tp=2,tp2=2,vocab",
    "dp=2,tp=2,vocab,zero1",
    "pp=2,dp=2,micro=4,1f1b",
    "pp=2,dp=2,micro=4,gpipe",
    "pp=2,tp=2,vocab,micro=4,1f1b",
    "pp=4,micro=8,1f1b",
)
FEW_PLANS = (
    "dp=4,zero3",
    "tp=4,vocab",
    "tp=2,tp2=2,vocab",
    "dp=2,tp=2,vocab",
    "pp=2,dp=2,micro=4,gpipe",
    "pp=2,tp=2,vocab,micro=4,1f1b",
    "pp=4,micro=8,1f1b",
)
MOE_PLANS = ("dp=4", "dp=4,zero3", "dp=4,experts", "tp=4,vocab", "dp=2,tp=2,vocab", "pp=2,dp=2,micro=4,1f1b")


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """A cluster file, and which plans of which models are tried on it."""

    name: str
    plans: dict[str, tuple[str, ...]]

    @property
    def path(self) -> str:
        return f"{CLUSTERS}/{self.name}.yaml"


TOPOLOGIES = (
    Topology(name="flat-of-4", plans={"GPT": FLAT_PLANS, "MoE": MOE_PLANS}),
    Topology(name="two-by-two-slow", plans={"Llama": LEVEL_PLANS}),
    Topology(name="slow-ring-of-4", plans={"GPT": FEW_PLANS}),
    Topology(name="pairs-of-2x2", plans={"Llama": FEW_PLANS, "MoE": MOE_PLANS}),
)
QUICK = (Topology(name="flat-of-4", plans={"GPT": ("dp=4", "tp=4,vocab", "pp=2,dp=2,micro=4,1f1b")}),)
