// Threads that multiply packed experts as jobs come through host memory that a GPU maps.
//
// A job is in the mailbox, its number last; the sum of its experts' outputs goes back the same way
// (pallas_kernels/host_mailbox.py). Nothing here calls CUDA or Python. Codes lie as layout.py and
// mxfp4.py of pallas_kernels say. Inputs are rounded to 16-bit integers of one scale, so that sums
// of a group are exact.

#include <immintrin.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <thread>
#include <vector>

namespace {

constexpr int kMost = 16;  // experts of a job
constexpr int kBlock = 256;
using Clock = std::chrono::steady_clock;
constexpr auto kSpin = std::chrono::milliseconds(5);    // before a thread stops to spin
constexpr auto kPoll = std::chrono::microseconds(50);   // between looks of the one that then waits
constexpr auto kAwake = std::chrono::seconds(60);       // after the last job or call, before it sleeps

struct Request {
  std::atomic<int32_t> number;
  alignas(64) int32_t rows[kMost];  // of the store, -1: none
  alignas(64) float weights[kMost];
  alignas(64) float x[1];
};
struct Reply {
  std::atomic<int32_t> number;
  int32_t late;  // the kernel's, if none came in time
  alignas(64) float y[1];
};
static_assert(offsetof(Request, rows) == 64 && offsetof(Request, weights) == 128 &&
              offsetof(Request, x) == 192 && offsetof(Reply, y) == 64);

enum Kind : int32_t { kNone, kHalf, kFloat, kByte, kExponent };
constexpr int kMxfp4 = -4;  // its codes, in the place of a width

struct Matrices {  // [S, outputs, inputs], as `_Form` of host_worker.py
  const char *words, *scales, *zeros;
  const float* biases;  // [S, outputs], or none
  int64_t outputs, inputs;
  int32_t bits, group, scale_kind, zero_kind;
  int64_t groups() const { return (inputs + group - 1) / group; }
};

struct Gating {  // g sigmoid(alpha g) (u + offset), of gates and ups within limits
  float alpha, limit, offset;
  float operator()(float gate, float up) const {
    gate = std::min(gate, limit);
    return gate / (1.0f + std::exp(-alpha * gate)) * (std::clamp(up, -limit, limit) + offset);
  }
};

struct Input {  // a vector in 16-bit integers, and the sums of its groups
  std::vector<int16_t> values;
  std::vector<float> sums;
  float scale;
};

#ifdef __AVX512BW__
using Int = __m512i;
using Float = __m512;
Int load(const void* p) { return _mm512_loadu_si512(p); }
Int zero() { return _mm512_setzero_si512(); }
Int shifted(Int v, int count, int mask) {
  return _mm512_and_si512(_mm512_srli_epi16(v, count), _mm512_set1_epi16(mask));
}
Int joined(Int high, Int low) { return _mm512_or_si512(_mm512_slli_epi16(high, 1), low); }
Int masked(Int v, int mask) { return _mm512_and_si512(v, _mm512_set1_epi32(mask)); }
Int either(Int a, Int b) { return _mm512_or_si512(a, b); }
template <int count> Int rotated(Int v) { return _mm512_rol_epi32(v, count); }
Int looked_up(__m128i table, Int v) { return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(table), v); }
Int with_sign(Int v, Int of) {
  return _mm512_mask_sub_epi16(v, _mm512_movepi16_mask(of), _mm512_setzero_si512(), v);
}
Int load_words(const char* p, int64_t count) {  // the first ones; none beyond is read
  return _mm512_maskz_loadu_epi32(count < 16 ? (1 << count) - 1 : 0xffff, p);
}
void store(int16_t* p, Int v) { _mm512_storeu_si512(p, v); }
Int add_products(Int sum, Int a, Int b) { return _mm512_add_epi32(sum, _mm512_madd_epi16(a, b)); }
Float none() { return _mm512_setzero_ps(); }
Float scaled(Float total, Int sum, float s) {
  return _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), _mm512_set1_ps(s), total);
}
float total_of(Float v) { return _mm512_reduce_add_ps(v); }
Int single_bits(const char* from, int c) {  // 16 lanes have positions 2 c and 2 c + 1 of 32 codes
  const Int both = _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i*)from));
  const Int counts = _mm512_inserti64x4(_mm512_set1_epi16(2 * c), _mm256_set1_epi16(2 * c + 1), 1);
  return _mm512_and_si512(_mm512_srlv_epi16(both, counts), _mm512_set1_epi16(1));
}
#else
using Int = __m256i;
using Float = __m256;
Int load(const void* p) { return _mm256_loadu_si256(static_cast<const Int*>(p)); }
Int zero() { return _mm256_setzero_si256(); }
Int shifted(Int v, int count, int mask) {
  return _mm256_and_si256(_mm256_srli_epi16(v, count), _mm256_set1_epi16(mask));
}
Int joined(Int high, Int low) { return _mm256_or_si256(_mm256_slli_epi16(high, 1), low); }
Int masked(Int v, int mask) { return _mm256_and_si256(v, _mm256_set1_epi32(mask)); }
Int either(Int a, Int b) { return _mm256_or_si256(a, b); }
template <int count> Int rotated(Int v) {
  return either(_mm256_slli_epi32(v, count), _mm256_srli_epi32(v, 32 - count));
}
Int looked_up(__m128i table, Int v) {
  return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), v);
}
Int with_sign(Int v, Int of) { return _mm256_sign_epi16(v, of); }  // 0 where `of` is 0
Int load_words(const char* p, int64_t count) {
  const Int numbers = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  return _mm256_maskload_epi32((const int*)p, _mm256_cmpgt_epi32(_mm256_set1_epi32(count), numbers));
}
void store(int16_t* p, Int v) { _mm256_storeu_si256((Int*)p, v); }
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
Int single_bits(const char* from, int c) { return shifted(load(from), c, 1); }
#endif
constexpr int kLanes = sizeof(Int) / 2;  // codes of one position in a vector

constexpr int bits_of(int width) { return width < 0 ? -width : width; }

// Codes of a position in words; of MXFP4 twice their values.
template <int width> inline Int codes_of(Int words, int position) {
  if constexpr (width == kMxfp4) {
    Int found = words;  // sign and magnitude in bits 15 and 8 to 6, as `small_pairs` has them
    if (position == 1) found = rotated<6>(words);
    if (position == 2) found = rotated<10>(words);
    if (position == 3)
      found = either(masked(rotated<4>(words), 0x81808180), masked(rotated<12>(words), 0x00400040));
    return with_sign(looked_up(_mm_setr_epi8(0, 1, 2, 3, 4, 6, 8, 12, 0, 0, 0, 0, 0, 0, 0, 0),
                               shifted(found, 6, 7)), found);
  } else {
    return shifted(words, position * width, (1 << width) - 1);
  }
}

// Codes `kLanes * c` and on of a whole block of a plane.
template <int width> inline Int plane_codes(const char* block, int c) {
  constexpr int kEach = 16 * bits_of(width) / kLanes;  // vectors of a position
  if constexpr (width == 1) {
    return single_bits(block, c);
  } else {
    return codes_of<width>(load(block + c % kEach * sizeof(Int)), c / kEach);
  }
}
template <int bits> inline Int block_codes(const char* row, int64_t inputs, int64_t b, int c) {
  if constexpr (bits == 3) {
    return joined(plane_codes<2>(row + b * 64, c), plane_codes<1>(row + inputs / 4 + b * 32, c));
  } else {
    return plane_codes<bits>(row + b * 32 * bits_of(bits), c);
  }
}

// Codes of the last block, of `size` codes of a plane. `out` has room for a vector more: what is
// written beyond a position is overwritten by the next one.
template <int width> void unpack_last(const char* block, int64_t size, int16_t* out) {
  const int64_t lanes = size * bits_of(width) / 16;
  for (int p = 0; p < 16 / bits_of(width); ++p)
    for (int64_t i = 0; i < lanes; i += kLanes)
      store(out + p * lanes + i, codes_of<width>(load_words(block + 2 * i, (lanes - i) / 2), p));
}

// The product of a row; `unit` codes have a scale each.
template <int bits, int unit>
float blocks_product(const char* row, int64_t inputs, const int16_t* values, const float* scales) {
  Float total = none();
  constexpr int kBytes = 32 * bits_of(bits);
  for (int64_t b = 0; b < inputs / kBlock; ++b) {
    for (int line = 0; line < kBytes; line += 64)
      _mm_prefetch(row + b * kBytes + 2048 + line, _MM_HINT_T0);
#pragma GCC unroll 16
    for (int u = 0; u < kBlock / unit; ++u) {
      Int sum = zero();
#pragma GCC unroll 16
      for (int c = u * (unit / kLanes); c < (u + 1) * (unit / kLanes); ++c)
        sum = add_products(sum, block_codes<bits>(row, inputs, b, c),
                           load(values + b * kBlock + c * kLanes));
      total = scaled(total, sum, scales[b * (kBlock / unit) + u]);
    }
  }
  const int64_t whole = inputs / kBlock * kBlock, rest = inputs - whole;
  if (rest == 0) return total_of(total);
  int16_t codes[kBlock + kLanes], low[kBlock + kLanes];
  if constexpr (bits == 3) {
    unpack_last<2>(row + whole / 4, rest, codes);
    unpack_last<1>(row + inputs / 4 + whole / 8, rest, low);
  } else {
    unpack_last<bits>(row + whole * bits_of(bits) / 8, rest, codes);
  }
  for (int64_t k = 0; k < rest; k += 32) {
    Int sum = zero();
    for (int64_t i = k; i < k + 32; i += kLanes) {
      const Int high = load(codes + i);
      const Int both = bits == 3 ? joined(high, load(low + i)) : high;
      sum = add_products(sum, both, load(values + whole + i));
    }
    total = scaled(total, sum, scales[(whole + k) / unit]);
  }
  return total_of(total);
}

template <int bits>
float blocks_of(int unit, const char* row, int64_t inputs, const int16_t* values, const float* s) {
  switch (unit) {
    case 32: return blocks_product<bits, 32>(row, inputs, values, s);
    case 64: return blocks_product<bits, 64>(row, inputs, values, s);
    case 128: return blocks_product<bits, 128>(row, inputs, values, s);
    default: return blocks_product<bits, 256>(row, inputs, values, s);
  }
}

void round_input(const float* x, int64_t count, int group, Input& out) {
  float most = 1e-30f;
  for (int64_t k = 0; k < count; ++k) most = std::max(most, std::fabs(x[k]));
  const float inverse = 32000.0f / most;
  out.scale = most / 32000.0f;
  for (int64_t k = 0; k < count; ++k)
    out.values[k] = static_cast<int16_t>(std::lrintf(x[k] * inverse));
  for (int64_t g = 0; g * group < count; ++g) {
    int32_t sum = 0;
    for (int64_t k = g * group; k < std::min<int64_t>(count, (g + 1) * group); ++k)
      sum += out.values[k];
    out.sums[g] = static_cast<float>(sum);
  }
}

// Numbers `at` and on of an array of some kind.
void widen(const char* from, int kind, int64_t at, int64_t count, float none, float* out) {
  int64_t i = 0;
  switch (kind) {
    case kHalf: {
      const auto* p = reinterpret_cast<const uint16_t*>(from) + at;
      for (; i + 8 <= count; i += 8)
        _mm256_storeu_ps(out + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(p + i))));
      for (; i < count; ++i) out[i] = _cvtsh_ss(p[i]);
      break;
    }
    case kFloat: std::memcpy(out, from + 4 * at, 4 * count); break;
    case kByte:
      for (; i < count; ++i) out[i] = static_cast<uint8_t>(from[at + i]);
      break;
    case kExponent:  // halves of the scales, since values are doubled
      for (auto* words = reinterpret_cast<uint32_t*>(out); i < count; ++i)
        words[i] = (std::max<int>(1, static_cast<uint8_t>(from[at + i])) - 1) << 23;
      break;
    default: std::fill(out, out + count, none);
  }
}

float row_product(const Matrices& m, int64_t slot, int64_t row, const Input& x, float* scales) {
  const int64_t at = slot * m.outputs + row, groups = m.groups();
  const bool is_mxfp4 = m.scale_kind == kExponent;
  const char* words = m.words + at * (m.inputs * m.bits / 8);
  float* zeros = scales + groups;
  widen(m.scales, m.scale_kind, at * groups, groups, 0, scales);
  widen(m.zeros, m.zero_kind, at * groups, groups, is_mxfp4 ? 0 : 1 << (m.bits - 1), zeros);
  float total = 0, shift = 0;
  for (int64_t g = 0; g < groups; ++g) shift += scales[g] * zeros[g] * x.sums[g];
  if (m.group > kBlock)  // a scale for each block, from the last to the first: groups are fewer
    for (int64_t b = (m.inputs + kBlock - 1) / kBlock; b-- > 0;)
      zeros[b] = scales[b * kBlock / m.group];
  const float* of_units = m.group > kBlock ? zeros : scales;
  const int16_t* values = x.values.data();
  switch (is_mxfp4 ? kMxfp4 : m.bits) {
    case kMxfp4: total = blocks_product<kMxfp4, 32>(words, m.inputs, values, of_units); break;
    case 2: total = blocks_of<2>(m.group, words, m.inputs, values, of_units); break;
    case 3: total = blocks_of<3>(m.group, words, m.inputs, values, of_units); break;
    case 4: total = blocks_of<4>(m.group, words, m.inputs, values, of_units); break;
    default: total = blocks_of<8>(m.group, words, m.inputs, values, of_units);
  }
  return (total - shift) * x.scale + (m.biases ? m.biases[at] : 0.0f);
}

class Workers {
 public:
  Workers(int count, char* mailbox, int64_t reply_at, const Matrices* forms, Gating gating)
      : count_(count), request_(reinterpret_cast<Request*>(mailbox)),
        reply_(reinterpret_cast<Reply*>(mailbox + reply_at)), gate_up_(forms[0]), down_(forms[1]),
        gating_(gating), hidden_(kMost * down_.inputs), inputs_(count * (kMost + 1)),
        scales_(count) {
    for (size_t i = 0; i < inputs_.size(); ++i) {
      const Matrices& m = i % (kMost + 1) == kMost ? gate_up_ : down_;
      inputs_[i].values.resize(m.inputs);
      inputs_[i].sums.resize(m.groups());
    }
    for (auto& own : scales_)
      own.resize(2 * std::max(gate_up_.groups(), down_.groups()) +
                 std::max(gate_up_.inputs, down_.inputs) / kBlock + 1);
    first_number_ = request_->number.load();
    for (int t = 0; t < count; ++t) threads_.emplace_back([this, t] { serve(t); });
  }
  ~Workers() {
    stop_ = true;
    wake();
    for (std::thread& thread : threads_) thread.join();
  }

  void wake() {  // no step runs until it is called; a thread that sleeps serves the next one
    std::lock_guard<std::mutex> held(mutex_);
    ++calls_;
    changed_.notify_all();
  }

 private:
  int32_t number() const { return request_->number.load(std::memory_order_acquire); }

  void serve(int t) {
    for (int32_t last = first_number_, turns = 0;;) {
      if (!await(t, last)) return;
      last = number();
      run(t, last, ++turns);
    }
  }

  // Returns once there is a job that is not `last`; false: stop. The first thread looks on while the
  // others sleep, and wakes them: whoever is about to sleep is counted before it looks once more.
  bool await(int t, int32_t last) {
    int64_t calls = calls_;
    for (auto since = Clock::now();;) {
      for (int i = 0; i < 200; ++i) {
        if (number() != last) {
          if (t == 0 && sleeping_.load()) wake();
          return true;
        }
        if (stop_.load(std::memory_order_relaxed)) return false;
        _mm_pause();
      }
      const auto idle = Clock::now() - since;
      if (idle < kSpin) continue;
      if (t == 0 && idle < kAwake) {
        std::this_thread::sleep_for(kPoll);
        continue;
      }
      std::unique_lock<std::mutex> held(mutex_);
      sleeping_.fetch_add(1);
      changed_.wait(held, [&] { return calls_ != calls || stop_ || number() != last; });
      sleeping_.fetch_sub(1);
      calls = calls_;  // one that came since `since` counts as well
      since = Clock::now();
    }
  }

  void run(int t, int32_t number, int32_t turn) {
    int count = 0;
    int32_t rows[kMost];
    float weights[kMost];
    for (int i = 0; i < kMost; ++i)
      if (request_->rows[i] >= 0) {
        rows[count] = request_->rows[i];
        weights[count++] = request_->weights[i];
      }
    const int64_t width = down_.inputs, outputs = down_.outputs;
    Input* own = &inputs_[t * (kMost + 1)];
    float* scales = scales_[t].data();
    if (count) {
      round_input(request_->x, gate_up_.inputs, gate_up_.group, own[kMost]);
      const int64_t all = count * width;
      for (int64_t i = all * t / count_; i < all * (t + 1) / count_; ++i) {
        const int64_t slot = rows[i / width], row = i % width;
        const float gate = row_product(gate_up_, slot, row, own[kMost], scales);
        const float up = row_product(gate_up_, slot, width + row, own[kMost], scales);
        hidden_[i] = gating_(gate, up);
      }
      first_.fetch_add(1, std::memory_order_acq_rel);
      while (first_.load(std::memory_order_acquire) < turn * int64_t{count_}) _mm_pause();
      for (int e = 0; e < count; ++e) round_input(&hidden_[e * width], width, down_.group, own[e]);
      for (int64_t row = outputs * t / count_; row < outputs * (t + 1) / count_; ++row) {
        float sum = 0;
        for (int e = 0; e < count; ++e)
          sum += weights[e] * row_product(down_, rows[e], row, own[e], scales);
        reply_->y[row] = sum;
      }
    } else {
      first_.fetch_add(1, std::memory_order_acq_rel);
    }
    if (second_.fetch_add(1, std::memory_order_acq_rel) + 1 == turn * int64_t{count_})
      reply_->number.store(number, std::memory_order_release);
  }

  const int count_;
  Request* const request_;
  Reply* const reply_;
  const Matrices gate_up_, down_;
  const Gating gating_;
  std::vector<float> hidden_;
  std::vector<Input> inputs_;
  std::vector<std::vector<float>> scales_;
  int32_t first_number_ = 0;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::atomic<int64_t> calls_{0};
  std::atomic<int> sleeping_{0};
  std::atomic<bool> stop_{false};
  alignas(64) std::atomic<int64_t> first_{0};
  alignas(64) std::atomic<int64_t> second_{0};
  std::vector<std::thread> threads_;
};

double seconds() {
  return std::chrono::duration<double>(Clock::now().time_since_epoch()).count();
}

}  // namespace

extern "C" {

// `forms`: of gate_up [S, 2F, D] and of down [S, D, F].
void* start_workers(int count, void* mailbox, int64_t reply_at, const void* forms, Gating gating) {
  return new Workers(count, static_cast<char*>(mailbox), reply_at,
                     static_cast<const Matrices*>(forms), gating);
}

void stop_workers(void* workers) { delete static_cast<Workers*>(workers); }

void wake_workers(void* workers) { static_cast<Workers*>(workers)->wake(); }

// Runs jobs that the host itself posts, rows[jobs][count]; returns the seconds of all. Their numbers
// are negative, and so never a step's.
double run_jobs(void* mailbox, int64_t reply_at, int jobs, int count, const int32_t* rows) {
  auto* request = static_cast<Request*>(mailbox);
  auto* reply = reinterpret_cast<Reply*>(static_cast<char*>(mailbox) + reply_at);
  const double start = seconds();
  for (int j = 0; j < jobs; ++j) {
    std::fill(request->rows, request->rows + kMost, -1);
    std::memcpy(request->rows, rows + j * count, 4 * count);
    const int32_t last = request->number.load(), number = last < 0 ? last - 1 : -1;
    request->number.store(number, std::memory_order_release);
    while (reply->number.load(std::memory_order_acquire) != number) _mm_pause();
  }
  return seconds() - start;
}

}
