// The published names of PixArt's weights.
#pragma once

namespace kiln {

// The names of layers. From self_out on they are names within a block.
struct PixartKeys {
  const char *patch, *timestep_1, *timestep_2, *modulation, *caption_1, *caption_2;
  const char *size_1, *size_2, *aspect_1, *aspect_2, *final_linear, *final_table, *blocks;
  const char *self_out, *cross_q, *cross_out, *mlp_1, *mlp_2;
};

inline constexpr PixartKeys kPixartRepositoryKeys = {.patch = "x_embedder.proj",
                                                     .timestep_1 = "t_embedder.mlp.0",
                                                     .timestep_2 = "t_embedder.mlp.2",
                                                     .modulation = "t_block.1",
                                                     .caption_1 = "y_embedder.y_proj.fc1",
                                                     .caption_2 = "y_embedder.y_proj.fc2",
                                                     .size_1 = "csize_embedder.mlp.0",
                                                     .size_2 = "csize_embedder.mlp.2",
                                                     .aspect_1 = "ar_embedder.mlp.0",
                                                     .aspect_2 = "ar_embedder.mlp.2",
                                                     .final_linear = "final_layer.linear",
                                                     .final_table = "final_layer.scale_shift_table",
                                                     .blocks = "blocks",
                                                     .self_out = "attn.proj",
                                                     .cross_q = "cross_attn.q_linear",
                                                     .cross_out = "cross_attn.proj",
                                                     .mlp_1 = "mlp.fc1",
                                                     .mlp_2 = "mlp.fc2"};
inline constexpr PixartKeys kPixartDiffusersKeys = {
    .patch = "pos_embed.proj",
    .timestep_1 = "adaln_single.emb.timestep_embedder.linear_1",
    .timestep_2 = "adaln_single.emb.timestep_embedder.linear_2",
    .modulation = "adaln_single.linear",
    .caption_1 = "caption_projection.linear_1",
    .caption_2 = "caption_projection.linear_2",
    .size_1 = "adaln_single.emb.resolution_embedder.linear_1",
    .size_2 = "adaln_single.emb.resolution_embedder.linear_2",
    .aspect_1 = "adaln_single.emb.aspect_ratio_embedder.linear_1",
    .aspect_2 = "adaln_single.emb.aspect_ratio_embedder.linear_2",
    .final_linear = "proj_out",
    .final_table = "scale_shift_table",
    .blocks = "transformer_blocks",
    .self_out = "attn1.to_out.0",
    .cross_q = "attn2.to_q",
    .cross_out = "attn2.to_out.0",
    .mlp_1 = "ff.net.0.proj",
    .mlp_2 = "ff.net.2"};

// The repository has one projection, diffusers one for each part.
inline constexpr const char* kPixartQkv = "attn.qkv";
inline constexpr const char* kPixartKv = "cross_attn.kv_linear";
inline constexpr const char* kPixartQkvParts[] = {"attn1.to_q", "attn1.to_k", "attn1.to_v"};
inline constexpr const char* kPixartKvParts[] = {"attn2.to_k", "attn2.to_v"};

}  // namespace kiln
