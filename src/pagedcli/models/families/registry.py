"""The native families by the model_type of their config.json. Free of torch."""

import json
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from pagedcli.models.family import Llama


@dataclass(frozen=True, slots=True)
class Family:
    """A native family."""

    architecture: str
    reader: str | type[Llama]  # the class for its config.json, or "module.Name" of it in this folder
    # usual model_type of the language model that is a part, `text_config`, of one that sees images: its tensors lie in
    # `model.language_model`
    text: str | None = None

    @property
    def config(self) -> type[Llama]:
        """The class for its config.json; importing all of them takes a tenth of a second."""
        if not isinstance(self.reader, str):
            return self.reader
        module, _, name = self.reader.partition(".")
        found: type[Llama] = getattr(import_module(f"pagedcli.models.families.{module}"), name)
        return found


FAMILIES = {
    "llama": Family("LlamaForCausalLM", "dense.Llama"),
    "mistral": Family("MistralForCausalLM", "dense.Mistral"),
    "mistral3": Family("Mistral3ForConditionalGeneration", "dense.Mistral", text="mistral"),
    "ministral3": Family("Ministral3ForCausalLM", "dense.Ministral3"),
    "arcee": Family("ArceeForCausalLM", "dense.Arcee"),
    "apertus": Family("ApertusForCausalLM", "dense.Apertus"),
    "nemotron": Family("NemotronForCausalLM", "dense.Nemotron"),
    "stablelm": Family("StableLmForCausalLM", "dense.StableLm"),
    "starcoder2": Family("Starcoder2ForCausalLM", "dense.Starcoder2"),
    "cohere": Family("CohereForCausalLM", "dense.Cohere"),
    "cohere2": Family("Cohere2ForCausalLM", "dense.Cohere2"),
    "hunyuan_v1_dense": Family("HunYuanDenseV1ForCausalLM", "dense.HunYuanDenseV1"),
    "glm": Family("GlmForCausalLM", "dense.Glm"),
    "glm4": Family("Glm4ForCausalLM", "dense.Glm4"),
    "exaone4": Family("Exaone4ForCausalLM", "dense.Exaone4"),
    "seed_oss": Family("SeedOssForCausalLM", "dense.SeedOss"),
    "ernie4_5": Family("Ernie4_5ForCausalLM", "dense.Ernie4_5"),
    "ernie4_5_moe": Family("Ernie4_5_MoeForCausalLM", "mixtures.Ernie4_5Moe"),
    "glm4_moe": Family("Glm4MoeForCausalLM", "mixtures.Glm4Moe"),
    "cohere2_moe": Family("Cohere2MoeForCausalLM", "mixtures.Cohere2Moe"),
    "solar_open": Family("SolarOpenForCausalLM", "mixtures.SolarOpen"),
    "exaone_moe": Family("ExaoneMoeForCausalLM", "mixtures.ExaoneMoe"),
    "hy_v3": Family("HYV3ForCausalLM", "mixtures.HyV3"),
    "minimax_m2": Family("MiniMaxM2ForCausalLM", "mixtures.MiniMaxM2"),
    "hunyuan_v1_moe": Family("HunYuanMoEV1ForCausalLM", "mixtures.HunYuanMoeV1"),
    "glm4_moe_lite": Family("Glm4MoeLiteForCausalLM", "latents.DeepseekV3"),
    "deepseek_v2": Family("DeepseekV2ForCausalLM", "latents.DeepseekV2"),
    "deepseek_v3": Family("DeepseekV3ForCausalLM", "latents.DeepseekV3"),
    "minicpm3": Family("MiniCPM3ForCausalLM", "latents.MiniCpm3"),
    "youtu": Family("YoutuForCausalLM", "latents.Latents"),
    "helium": Family("HeliumForCausalLM", "dense.Helium"),
    "cwm": Family("CwmForCausalLM", "dense.Cwm"),
    "qwen2": Family("Qwen2ForCausalLM", "dense.Qwen2"),
    "qwen3": Family("Qwen3ForCausalLM", "dense.Qwen3"),
    "qwen3_vl_text": Family("Qwen3VLForCausalLM", "dense.Qwen3Vl"),
    "qwen3_vl": Family("Qwen3VLForConditionalGeneration", "dense.Qwen3Vl", text="qwen3_vl_text"),
    "qwen3_vl_moe_text": Family("Qwen3VLMoeForCausalLM", "mixtures.Qwen3VlMoe"),
    "qwen3_vl_moe": Family("Qwen3VLMoeForConditionalGeneration", "mixtures.Qwen3VlMoe", text="qwen3_vl_moe_text"),
    # rotary embeddings with three positions, which are equal for text
    "qwen2_vl_text": Family("Qwen2VLForCausalLM", "dense.Qwen2"),
    "qwen2_vl": Family("Qwen2VLForConditionalGeneration", "dense.Qwen2", text="qwen2_vl_text"),
    "qwen2_5_vl_text": Family("Qwen2_5_VLForCausalLM", "dense.Qwen2"),
    "qwen2_5_vl": Family("Qwen2_5_VLForConditionalGeneration", "dense.Qwen2", text="qwen2_5_vl_text"),
    "muse_glimmer_text": Family("MuseGlimmerForCausalLM", "dense.MuseGlimmer"),
    "muse_glimmer": Family("MuseGlimmerForConditionalGeneration", "dense.MuseGlimmer", text="muse_glimmer_text"),
    "olmo2": Family("Olmo2ForCausalLM", "dense.Olmo2"),
    "olmo3": Family("Olmo3ForCausalLM", "dense.Olmo3"),
    "granite": Family("GraniteForCausalLM", "dense.Granite"),
    "granite_swa": Family("GraniteSWAForCausalLM", "dense.GraniteSwa"),
    "hyperclovax": Family("HyperCLOVAXForCausalLM", "dense.HyperClovaX"),
    "granitemoe": Family("GraniteMoeForCausalLM", "mixtures.GraniteMoe"),
    "granitemoeshared": Family("GraniteMoeSharedForCausalLM", "mixtures.GraniteMoe"),
    "granitemoe_swa": Family("GraniteMoeSWAForCausalLM", "mixtures.GraniteMoeSwa"),
    "smollm3": Family("SmolLM3ForCausalLM", "dense.SmolLM3"),
    "phi3": Family("Phi3ForCausalLM", "dense.Phi3"),
    "gemma": Family("GemmaForCausalLM", "dense.Gemma"),
    "gemma2": Family("Gemma2ForCausalLM", "dense.Gemma2"),
    "gemma3_text": Family("Gemma3ForCausalLM", "dense.Gemma3"),
    "gemma3": Family("Gemma3ForConditionalGeneration", "dense.Gemma3", text="gemma3_text"),
    "qwen3_moe": Family("Qwen3MoeForCausalLM", "mixtures.Qwen3Moe"),
    "mellum": Family("MellumForCausalLM", "mixtures.Mellum"),
    "qwen2_moe": Family("Qwen2MoeForCausalLM", "mixtures.Qwen2Moe"),
    "laguna": Family("LagunaForCausalLM", "mixtures.Laguna"),
    "mixtral": Family("MixtralForCausalLM", "mixtures.Mixtral"),
    "phimoe": Family("PhimoeForCausalLM", "mixtures.PhiMoe"),
    "olmoe": Family("OlmoeForCausalLM", "mixtures.Olmoe"),
    "gpt_oss": Family("GptOssForCausalLM", "mixtures.GptOss"),
    "qwen3_next": Family("Qwen3NextForCausalLM", "hybrids.Qwen3Next"),
    "kimi_linear": Family("KimiLinearForCausalLM", "hybrids.KimiLinear"),
    "olmo_hybrid": Family("OlmoHybridForCausalLM", "hybrids.OlmoHybrid"),
    "lfm2": Family("Lfm2ForCausalLM", "hybrids.Lfm2"),
    "lfm3": Family("Lfm3ForCausalLM", "hybrids.Lfm3"),
    "lfm2_moe": Family("Lfm2MoeForCausalLM", "hybrids.Lfm2Moe"),
    "bamba": Family("BambaForCausalLM", "hybrids.Bamba"),
    "falcon_h1": Family("FalconH1ForCausalLM", "hybrids.FalconH1"),
    "nemotron_h": Family("NemotronHForCausalLM", "hybrids.NemotronH"),
    "granitemoehybrid": Family("GraniteMoeHybridForCausalLM", "hybrids.GraniteMoeHybrid"),
    "gemma4_text": Family("Gemma4ForCausalLM", "gemma4.Gemma4"),
    "gemma4": Family("Gemma4ForConditionalGeneration", "gemma4.Gemma4", text="gemma4_text"),
    "gemma4_unified_text": Family("Gemma4UnifiedForCausalLM", "gemma4.Gemma4Unified"),
    "gemma4_unified": Family(
        "Gemma4UnifiedForConditionalGeneration", "gemma4.Gemma4Unified", text="gemma4_unified_text"
    ),
    "qwen3_5_text": Family("Qwen3_5ForCausalLM", "hybrids.Qwen3_5"),
    "qwen3_5": Family("Qwen3_5ForConditionalGeneration", "hybrids.Qwen3_5", text="qwen3_5_text"),
    "qwen3_5_moe_text": Family("Qwen3_5MoeForCausalLM", "hybrids.Qwen3_5Moe"),
    "qwen3_5_moe": Family("Qwen3_5MoeForConditionalGeneration", "hybrids.Qwen3_5Moe", text="qwen3_5_moe_text"),
}


@cache
def defaults() -> dict[str, dict[str, Any]]:
    """Defaults of fields by model_type, where config.json leaves them out: those of transformers' config classes, which
    take seconds to import. scripts/renew.py writes them."""
    return json.loads(Path(__file__).with_name("defaults.json").read_text(encoding="utf-8"))  # type: ignore[no-any-return]
