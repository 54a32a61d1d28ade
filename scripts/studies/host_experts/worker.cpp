// Threads that multiply packed INT4 experts as jobs come through host memory that a GPU maps.
//
// A job is in the mailbox, its number last; the sum of its experts' outputs goes back the same way.
// Nothing here calls CUDA or Python. Codes lie as pallas_kernels/layout.py says: 16-bit lane 2 j + h
// of a block of 256 codes has, at bit 4 p, code 64 p + 2 j + h. Inputs are rounded to 16-bit integers
// of one scale, so sums of a group of 64 are exact.

#include <immintrin.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

namespace {

constexpr int kMost = 8;        // experts of a job
constexpr int kInputs = 8192;   // most inputs of a matrix
constexpr int kReply = 65536;   // byte of the mailbox where replies begin
constexpr int kBlock = 256, kGroup = 64;

struct Request {
  std::atomic<int32_t> number;
  int32_t count;
  int32_t rows[kMost];
  float weights[kMost];
  alignas(64) float x[kInputs];
};
struct Reply {
  std::atomic<int32_t> number;
  alignas(64) float y[kInputs];
};
static_assert(sizeof(Request) <= kReply - 1024 && offsetof(Request, x) == 128);

struct Matrices {  // [S, N, K] in words [S, N, K / 8], scales and zeros [S, N, K / 64] of 16 bits
  const uint32_t* words;
  const uint16_t *scales, *zeros;
  int64_t outputs, inputs;
};

struct Input {  // a vector in 16-bit integers, and the sums of its groups
  alignas(64) int16_t values[kInputs];
  alignas(64) float sums[kInputs / kGroup];
  float scale;
};

#ifdef __AVX512BW__
using Int = __m512i;
using Float = __m512;
Int load(const void* p) { return _mm512_loadu_si512(p); }
Int zero() { return _mm512_setzero_si512(); }
template <int p> Int codes(Int words) {
  return _mm512_and_si512(_mm512_srli_epi16(words, 4 * p), _mm512_set1_epi16(15));
}
Int add_products(Int sum, Int a, Int b) { return _mm512_add_epi32(sum, _mm512_madd_epi16(a, b)); }
Float none() { return _mm512_setzero_ps(); }
Float scaled(Float total, Int sum, float s) {
  return _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), _mm512_set1_ps(s), total);
}
float total_of(Float v) { return _mm512_reduce_add_ps(v); }
#else
using Int = __m256i;
using Float = __m256;
Int load(const void* p) { return _mm256_loadu_si256(static_cast<const Int*>(p)); }
Int zero() { return _mm256_setzero_si256(); }
template <int p> Int codes(Int words) {
  return _mm256_and_si256(_mm256_srli_epi16(words, 4 * p), _mm256_set1_epi16(15));
}
Int add_products(Int sum, Int a, Int b) { return _mm256_add_epi32(sum, _mm256_madd_epi16(a, b)); }
Float none() { return _mm256_setzero_ps(); }
Float scaled(Float total, Int sum, float s) {
  return _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum), _mm256_set1_ps(s), total);
}
float total_of(Float v) {
  __m128 h = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  h = _mm_add_ps(h, _mm_movehl_ps(h, h));
  return _mm_cvtss_f32(_mm_add_ss(h, _mm_movehdup_ps(h)));
}
#endif
constexpr int kLanes = sizeof(Int) / 2;  // codes of one position in a vector

void round_input(const float* x, int count, Input& out) {
  float most = 1e-30f;
  for (int k = 0; k < count; ++k) most = std::max(most, std::fabs(x[k]));
  const float inverse = 32000.0f / most;
  out.scale = most / 32000.0f;
  for (int k = 0; k < count; ++k) out.values[k] = static_cast<int16_t>(std::lrintf(x[k] * inverse));
  for (int g = 0; g < count / kGroup; ++g) {
    int32_t sum = 0;
    for (int k = 0; k < kGroup; ++k) sum += out.values[g * kGroup + k];
    out.sums[g] = static_cast<float>(sum);
  }
}

float row_product(const Matrices& m, int64_t slot, int64_t row, const Input& x) {
  const int64_t at = slot * m.outputs + row, groups = m.inputs / kGroup;
  const char* words = reinterpret_cast<const char*>(m.words + at * (m.inputs / 8));
  alignas(64) float scales[kInputs / kGroup];
  __m128 zeros = _mm_setzero_ps();
  for (int64_t g = 0; g < groups; g += 4) {
    const auto four = [&](const uint16_t* p) {
      return _mm_cvtph_ps(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p + at * groups + g)));
    };
    const __m128 scale = four(m.scales);
    _mm_store_ps(scales + g, scale);
    zeros = _mm_fmadd_ps(_mm_mul_ps(scale, four(m.zeros)), _mm_load_ps(x.sums + g), zeros);
  }
  Float total = none();
  for (int64_t b = 0; b < m.inputs / kBlock; ++b) {
    Int sum0 = zero(), sum1 = zero(), sum2 = zero(), sum3 = zero();
    const int16_t* values = x.values + b * kBlock;
    for (int i = 0; i < kGroup / kLanes; ++i) {
      const char* from = words + b * (kBlock / 2) + i * sizeof(Int);
      _mm_prefetch(from + 2048, _MM_HINT_T0);
      const Int w = load(from);
      const int16_t* v = values + i * kLanes;
      sum0 = add_products(sum0, codes<0>(w), load(v));
      sum1 = add_products(sum1, codes<1>(w), load(v + kGroup));
      sum2 = add_products(sum2, codes<2>(w), load(v + 2 * kGroup));
      sum3 = add_products(sum3, codes<3>(w), load(v + 3 * kGroup));
    }
    const float* s = scales + b * (kBlock / kGroup);
    total = scaled(scaled(scaled(scaled(total, sum0, s[0]), sum1, s[1]), sum2, s[2]), sum3, s[3]);
  }
  zeros = _mm_add_ps(zeros, _mm_movehl_ps(zeros, zeros));
  zeros = _mm_add_ss(zeros, _mm_movehdup_ps(zeros));
  return (total_of(total) - _mm_cvtss_f32(zeros)) * x.scale;
}

float rounded(float value) {  // to bfloat16, as the GPU's hidden values are
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  bits = (bits + 0x7fff + ((bits >> 16) & 1)) & 0xffff0000u;
  std::memcpy(&value, &bits, 4);
  return value;
}

class Workers {
 public:
  Workers(int count, char* mailbox, Matrices gate_up, Matrices down)
      : count_(count), request_(reinterpret_cast<Request*>(mailbox)),
        reply_(reinterpret_cast<Reply*>(mailbox + kReply)), gate_up_(gate_up), down_(down),
        hidden_(kMost * down.inputs), inputs_(count * (kMost + 1)) {
    done_ = request_->number.load();
    for (int t = 0; t < count; ++t) threads_.emplace_back([this, t] { serve(t); });
  }
  ~Workers() {
    stop_ = true;
    for (std::thread& thread : threads_) thread.join();
  }

 private:
  void serve(int t) {
    for (int32_t last = done_, turns = 0;;) {
      int32_t number;
      while ((number = request_->number.load(std::memory_order_acquire)) == last) {
        if (stop_.load(std::memory_order_relaxed)) return;
        _mm_pause();
      }
      last = number;
      run(t, number, ++turns);
    }
  }

  void run(int t, int32_t number, int32_t turn) {
    const int count = request_->count;
    const int64_t width = down_.inputs, outputs = down_.outputs;
    Input* own = &inputs_[t * (kMost + 1)];
    if (count) {
      round_input(request_->x, gate_up_.inputs, own[kMost]);
      const int64_t all = count * width;
      for (int64_t i = all * t / count_; i < all * (t + 1) / count_; ++i) {
        const int64_t slot = request_->rows[i / width], row = i % width;
        const float gate = row_product(gate_up_, slot, row, own[kMost]);
        const float up = row_product(gate_up_, slot, width + row, own[kMost]);
        hidden_[i] = rounded(gate / (1.0f + std::exp(-gate)) * up);
      }
      first_.fetch_add(1, std::memory_order_acq_rel);
      while (first_.load(std::memory_order_acquire) < turn * count_) _mm_pause();
      for (int e = 0; e < count; ++e) round_input(&hidden_[e * width], width, own[e]);
      for (int64_t row = outputs * t / count_; row < outputs * (t + 1) / count_; ++row) {
        float sum = 0;
        for (int e = 0; e < count; ++e)
          sum += request_->weights[e] * row_product(down_, request_->rows[e], row, own[e]);
        reply_->y[row] = sum;
      }
    } else {
      first_.fetch_add(1, std::memory_order_acq_rel);
    }
    if (second_.fetch_add(1, std::memory_order_acq_rel) + 1 == turn * count_)
      reply_->number.store(number, std::memory_order_release);
  }

  const int count_;
  Request* const request_;
  Reply* const reply_;
  const Matrices gate_up_, down_;
  std::vector<float> hidden_;
  std::vector<Input> inputs_;
  int32_t done_ = 0;
  std::atomic<bool> stop_{false};
  alignas(64) std::atomic<int32_t> first_{0};
  alignas(64) std::atomic<int32_t> second_{0};
  std::vector<std::thread> threads_;
};

double seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace

extern "C" {

// Arrays: words, scales, zeros of gate_up [S, 2F, D], then of down [S, D, F].
void* start_workers(int count, void* mailbox, void** arrays, int64_t model_dim, int64_t expert_dim) {
  const auto matrices = [&](void** a, int64_t outputs, int64_t inputs) {
    return Matrices{static_cast<uint32_t*>(a[0]), static_cast<uint16_t*>(a[1]),
                    static_cast<uint16_t*>(a[2]), outputs, inputs};
  };
  return new Workers(count, static_cast<char*>(mailbox),
                     matrices(arrays, 2 * expert_dim, model_dim),
                     matrices(arrays + 3, model_dim, expert_dim));
}

void stop_workers(void* workers) { delete static_cast<Workers*>(workers); }

// Runs jobs that the host itself posts, rows[jobs][count]; returns the seconds of all. Their numbers
// are negative, and so never a step's.
double run_jobs(void* mailbox, int jobs, int count, const int32_t* rows) {
  auto* request = static_cast<Request*>(mailbox);
  auto* reply = reinterpret_cast<Reply*>(static_cast<char*>(mailbox) + kReply);
  const double start = seconds();
  for (int j = 0; j < jobs; ++j) {
    request->count = count;
    std::memcpy(request->rows, rows + j * count, 4 * count);
    const int32_t last = request->number.load(), number = last < 0 ? last - 1 : -1;
    request->number.store(number, std::memory_order_release);
    while (reply->number.load(std::memory_order_acquire) != number) _mm_pause();
  }
  return seconds() - start;
}

// Reads bytes by some threads, each its share, and returns the seconds of the whole.
double read_bytes(const char* from, int64_t bytes, int count) {
  std::vector<std::thread> threads;
  std::atomic<int64_t> kept{0};
  const double start = seconds();
  for (int t = 0; t < count; ++t)
    threads.emplace_back([&, t] {
      Int sum = zero();
      const char* p = from + bytes / count / 64 * t * 64;
      for (int64_t i = 0; i + 64 <= bytes / count; i += sizeof(Int)) {
        _mm_prefetch(p + i + 2048, _MM_HINT_T0);
        sum = add_products(sum, load(p + i), load(p));
      }
      kept += static_cast<int64_t>(total_of(scaled(none(), sum, 1.0f)));
    });
  for (std::thread& thread : threads) thread.join();
  return seconds() - start + (kept == 1 ? 1e-12 : 0);
}

}
