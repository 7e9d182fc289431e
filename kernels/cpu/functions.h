// The C functions of the library; the sources say what each one means.
#pragma once

#include <cstdint>

extern "C" {

int64_t quire_linear_width();
int quire_linear_bf16_in_pairs();
void quire_linear_pack(const void* weight, const void* w, int64_t stride, int threads);
int quire_linear(const void* weight, const void* x, int64_t x_stride, int64_t rows, void* y, int threads,
                 const void* next);

int quire_codes_in_hardware();
int64_t quire_codes_bytes(const void* weight);
int quire_codes_pack(const void* weight, int dtype, const void* w, int64_t stride, int threads);
void quire_codes_errors(const void* weight, int dtype, const void* w, int64_t stride, float* errors, int threads);
int quire_codes_linear(const void* weight, int dtype, const void* x, int64_t x_stride, int64_t rows, void* y,
                       int threads);

int quire_deciding_logits(const void* weight, const void* x, int64_t x_stride, int64_t rows, const float* temperature,
                          const int64_t* keys, float* y, int threads);

void quire_rms_norm(int dtype, const void* x, int64_t x_stride, int weight_dtype, const void* weight, void* y,
                    int64_t y_stride, int64_t rows, int64_t size, float eps, int num_threads);
void quire_add_rms_norm(int dtype, const void* x, int64_t x_stride, void* residual, int64_t residual_stride,
                        int weight_dtype, const void* weight, void* y, int64_t rows, int64_t size, float eps,
                        int num_threads);
void quire_add(int dtype, const void* x, int64_t x_stride, void* residual, int64_t residual_stride, int64_t rows,
               int64_t size, int num_threads);
void quire_take_rows(int dtype, const void* x, int64_t x_stride, const int64_t* rows, void* y, int64_t count,
                     int64_t size, float scale, int num_threads);
void quire_widen(int dtype, const void* x, float* y, int64_t size, int num_threads);
void quire_activate_mul(int dtype, int activation, const void* gate_up, int64_t stride, void* y, int64_t rows,
                        int64_t size, int num_threads);
void quire_soft_cap(float* x, int64_t size, float cap, int num_threads);
void quire_rope_and_write_kv(int dtype, void* qkv, int64_t qkv_stride, int64_t rows, int64_t num_heads,
                             int64_t num_kv_heads, int64_t head_dim, const int64_t* positions,
                             const int64_t* slots, const float* cos_sin, int64_t half, void* kv,
                             int64_t block_size, int64_t block_stride, int64_t value_offset, int weight_dtype,
                             const void* q_weight, const void* k_weight, float eps, int num_threads);

int quire_attention(int dtype, const void* q, int64_t q_stride, const void* kv, int64_t block_stride,
                    int64_t value_offset, void* out, const int32_t* query_start, const int32_t* context_lens,
                    const int32_t* block_tables, int64_t table_stride, int64_t num_requests, int64_t num_heads,
                    int64_t num_kv_heads, int64_t head_dim, int64_t block_size, int64_t window, float scale,
                    float soft_cap, int num_threads);

int quire_draw(const float* logits, int64_t stride, int64_t rows, int64_t vocab, const float* temperature,
               const float* min_p, const int64_t* top_k, const double* top_p, const int64_t* num_draws,
               const int64_t* seeds, const int64_t* positions, int64_t* tokens, float* largest, int num_threads);

void quire_edit_logits(float* logits, int64_t stride, int64_t vocab, int64_t count, const int64_t* edits,
                       const float* factors, int num_threads);
int quire_logprobs(const float* logits, int64_t stride, int64_t vocab, int64_t count, const int64_t* rows,
                   const int64_t* num_top, const int64_t* num_tokens, const int64_t* tokens, int64_t most_top,
                   double* normalizers, int64_t* top_ids, float* top_logits, float* token_logits, int64_t* ranks,
                   int num_threads);

int64_t quire_replay(const int64_t* words, int64_t count);
}
