// Implements choose.h: the conditions under which each kernel takes a call.

#include "plan/choose.h"

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <string>
#include <utility>

#include "plan/backward_workspace.h"
#include "plan/decode.h"
#include "plan/decode_sm80.h"
#include "plan/divisor.h"
#include "plan/float32_tiles.h"
#include "plan/float8.h"
#include "plan/half_values.h"
#include "plan/mask_words.h"
#include "plan/narrow_backward.h"
#include "plan/recipes.h"
#include "plan/segment_spans.h"
#include "plan/short.h"
#include "plan/tensor_map.h"

namespace jax_flash {
namespace {

using sm90::Recipe;

// The kernels compute row and column indices, and sums of the two, in 32 bits. Indices may go past
// the end by up to one tile.
constexpr int64_t kMaxTotalLength = (int64_t{1} << 31) - 1024;

Status check_operand(const char* name, const Shape& shape, const Operand& operand) {
  if (operand.dtype == DType::kFloat32) return {};  // kernels can access single elements
  const int64_t elements = operand.dtype == DType::kFloat8 ? 16 : 8;
  bool aligned = reinterpret_cast<uintptr_t>(operand.data) % 16 == 0 &&
                 operand.row % elements == 0 && operand.head % elements == 0;
  for (int axis = 0; axis < shape.num_batch_dims; ++axis) {
    aligned = aligned && operand.batch[axis] % elements == 0;
  }
  if (aligned) return {};
  return Status::invalid_argument(std::string("jax_flash: ") + name +
                                  ": expected an address and strides that are multiples of 16 "
                                  "bytes");
}

Status check_call(const Forward& params) {
  const Shape& shape = params.shape;
  if (shape.batch == 0 || shape.q_len == 0 || shape.kv_len == 0 || shape.heads == 0) {
    return Status::unimplemented(
        "jax_flash: axes: expected at least one batch entry, query, key and head; without, there is "
        "nothing to compute");
  }
  const DType dtype = params.query.dtype;
  const int32_t multiple = dtype == DType::kFloat32 ? 1 : dtype == DType::kFloat8 ? 16 : 8;
  const auto bad_dim = [&](int32_t dim) { return dim <= 0 || dim % multiple != 0; };
  if (bad_dim(shape.head_dim) || bad_dim(shape.value_dim)) {
    return Status::unimplemented(
        "jax_flash: head dims: expected positive multiples of " + std::to_string(multiple) +
        ", got " + std::to_string(shape.head_dim) + " and " + std::to_string(shape.value_dim));
  }
  if (int64_t{shape.q_len} + shape.kv_len > kMaxTotalLength) {
    return Status::unimplemented("jax_flash: q_len + kv_len: expected at most " +
                                 std::to_string(kMaxTotalLength) + ", got " +
                                 std::to_string(int64_t{shape.q_len} + shape.kv_len));
  }
  for (const auto& [name, operand] : {std::pair<const char*, const Operand&>{"query", params.query},
                                      {"key", params.key},
                                      {"value", params.value},
                                      {"out", params.out}}) {
    if (Status status = check_operand(name, shape, operand); !status.ok()) return status;
  }
  return {};
}

// Returns whether the copy engine can fetch tiles of all these operands. Except for
// float32, the sm_90 family has no other way to read them. `queries` have rows along T, `keys`
// along S.
bool fits_copy_engine(const Shape& shape, const std::initializer_list<const Operand*>& queries,
                      const std::initializer_list<const Operand*>& keys) {
  const auto all_fit = [&](const auto& operands, int64_t rows) {
    return std::all_of(operands.begin(), operands.end(), [&](const Operand* operand) {
      return fits_tensor_map(shape, *operand, rows);
    });
  };
  return all_fit(queries, shape.q_len) && all_fit(keys, shape.kv_len);
}

Status no_kernel(const Shape& shape) {
  return Status::unimplemented("jax_flash: no kernel for this dtype with head_dim " +
                               std::to_string(shape.head_dim) + " and value_dim " +
                               std::to_string(shape.value_dim));
}

// Sets the family and the instance's head dim. `fits_90` is true if the copy engine can fetch tiles
// of the operands.
Status choose_family(const Forward& params, int32_t family, bool fits_90, const Device& device,
                     const FindInstance& find, Choice& choice) {
  if (family != 0 && family != 80 && family != 90) {
    return Status::unimplemented("jax_flash: kernel family: expected 80 or 90, got " +
                                 std::to_string(family));
  }
  choice.general = modifiers_of(params) != kNoModifier;
  const bool takes = device.capability == 90 && fits_90;
  if (family == 90 && !takes) {
    return Status::unimplemented(
        device.capability == 90
            ? "jax_flash: the sm_90 kernels take operands of at most " +
                  std::to_string(kTensorMapBatchDims) +
                  " batch axes that no axis of length or heads is broadcast in"
            : "jax_flash: the sm_90 kernels run on sm_90 only, and this GPU is sm_" +
                  std::to_string(device.capability));
  }
  choice.family = 90;
  choice.head_dim = family != 80 && takes ? find(90, choice.general) : 0;
  if (choice.head_dim > kMaxUndividedHeadDim && choice.general) choice.head_dim = 0;
  if (choice.head_dim == 0 && family != 90) {
    choice.family = 80;
    if (family == 0 && device.capability == 90 && !fits_90 && find(90, choice.general) != 0 &&
        params.query.dtype != DType::kFloat32) {
      choice.reason = "Hopper's copy engine does not take that many batch axes";
    }
    choice.head_dim = find(80, choice.general);
    if (choice.head_dim == 0 &&
        !choice.general) {  // an instance for modifiers takes plain calls, too
      choice.head_dim = find(80, true);
      choice.general = choice.head_dim != 0;
    }
  }
  return choice.head_dim != 0 ? Status() : no_kernel(params.shape);
}

// Returns whether the sm_80 decoding kernel is faster than Hopper's for a 16-bit call that both
// take, as measured on an H200 (sm80/TUNING.md). If Hopper's divides units, which
// DecodePlan::make() mostly does below nine tenths of its workers, its second kernel takes 2.5 to 5
// us of a call with few keys, and that of sm_80 takes 2 us. With up to 64 columns, the sm_80 kernel
// also reads faster, unless there are so few units that each has many parts, or so many that none
// is divided. With lengths, which Hopper's kernel has to look through, it is faster even if none
// is.
bool sm80_decodes_faster(const Forward& params) {
  const Shape& shape = params.shape;
  const sm80::DecodeUnits units(shape);
  if (int64_t{units.group} * shape.q_len > sm80::kDecodeRows) return false;
  const bool divided =
      sm90::decode_splits(shape) > 1 && 10 * units.count < 9 * sm90::kDecodeMaxWorkers;
  const int64_t columns = int64_t{shape.head_dim} + shape.value_dim;
  const int64_t bytes = 2 * shape.batch * shape.kv_len * shape.kv_heads * columns;
  if (divided && bytes <= int64_t{16} << 20) return true;
  const bool narrow = std::max(shape.head_dim, shape.value_dim) <= 64;
  return narrow && units.count >= 32 && (divided || params.key_value_seq_lengths);
}

constexpr char kOneRowReason[] = "each key/value head has one query row of float32";

// Chooses the sm_80 decoding kernel if it takes the call and is faster: it takes any modifiers but
// dropout, and on Hopper, 16-bit calls without modifiers have a kernel of their own, which is
// faster unless sm80_decodes_faster(). Its float8 variant is an instance of Hopper's, since sm_80
// lacks instructions for it. Returns whether it is chosen. `fits_90`: see choose_family().
bool choose_decode(const Forward& params, int32_t family, bool fits_90, const Device& device,
                   const FindInstance& find, Choice& choice) {
  const bool plain = modifiers_of(params) == kNoModifier;
  const bool float8 = params.query.dtype == DType::kFloat8, hopper = device.capability == 90;
  const int32_t of_family = float8 ? 90 : 80;
  if (family == (float8 ? 80 : 90) || (float8 && !hopper) || params.extreme_rows_only ||
      params.options.dropout_threshold != 0 ||
      !sm80::takes_decode(params.shape, params.query.dtype)) {
    return false;
  }
  if (family == 0 && plain && !float8 && hopper && fits_90 && find(90, false) != 0 &&
      !sm80_decodes_faster(params)) {
    return false;
  }
  const int32_t head_dim = find(of_family, true);
  if (head_dim == 0 || head_dim > kMaxUndividedHeadDim) return false;
  choice.family = of_family;
  choice.head_dim = head_dim;
  choice.general = choice.decodes = true;
  const bool one_row = params.query.dtype == DType::kFloat32 && has_one_row(params.shape);
  choice.name = float8    ? "decode, FP8"
                : one_row ? "decode, one row, every modifier"
                          : "decode, every modifier";
  choice.reason = one_row ? kOneRowReason : "there are few query rows";
  choice.queries = one_row ? 1 : sm80::kDecodeRows;
  choice.keys = sm80::decode_warps(head_dim) * sm80::decode_warp_keys(head_dim, float8);
  return true;
}

// Chooses the kernel of sm80/decode/gradient.cuh if it takes the call. Returns whether it is
// chosen.
bool choose_one_row(const Backward& params, int32_t family, const FindInstance& find,
                    Choice& choice) {
  if (params.query.dtype != DType::kFloat32 || !has_one_row(params.shape) || family == 90 ||
      !sm80::takes_decode(params.shape, params.query.dtype) ||
      params.options.dropout_threshold != 0 || params.dbias || distance_floats(params) != 0) {
    return false;
  }
  const int32_t head_dim = find(80, true);
  if (head_dim == 0) return false;
  choice.family = 80;
  choice.head_dim = head_dim;
  choice.general = choice.decodes = true;
  choice.name = "one row, every modifier but dropout";
  choice.reason = kOneRowReason;
  choice.queries = 1;
  choice.keys = sm80::decode_warps(head_dim) * sm80::decode_warp_keys(head_dim, false);
  return true;
}

// Chooses Hopper's kernels for float32 if they take the call and are faster. They multiply in TF32,
// or split operands into float16. Returns whether they are chosen.
bool choose_float32(const Forward& params, bool is_backward, int32_t family, const Device& device,
                    const FindInstance& find, Choice& choice) {
  const Shape& shape = params.shape;
  const uint32_t modifiers = modifiers_of(params);
  const int32_t head_dim = sm90::float32_head_dim(shape);
  // Above head dim 128, and for split operands, there is no kernel without modifiers.
  const bool general =
      sm90::float32_modifiers(params) != kNoModifier || head_dim > 128 || choice.exact;
  if (params.query.dtype != DType::kFloat32 || family != 0 || device.capability != 90 ||
      params.options.smem_limit > 0 || (modifiers & ~sm90::kFloat32Modifiers) != 0 ||
      !sm90::takes_float32(shape, is_backward, choice.exact, sm90::float32_call(params),
                           sm90::attended_keys(params)) ||
      find(90, general) != head_dim) {
    return false;
  }
  choice.family = 90;
  choice.head_dim = head_dim;
  choice.general = general;
  choice.reason = choice.exact
                      ? "each product is three of float16, and many queries attend to many keys"
                      : "products are in TF32, and many queries attend to many keys";
  return true;
}

// Returns the recipe of a call that choose_float32() takes.
Recipe float32_recipe(const Forward& params, const Choice& choice) {
  if (!choice.general) return Recipe::kFloat32;
  const bool every = sm90::float32_modifiers(params) == sm90::kFloat32Modifiers;
  if (choice.exact) return every ? Recipe::kFloat16Modified : Recipe::kFloat16Elements;
  return every ? Recipe::kFloat32Modified : Recipe::kFloat32Elements;
}

// Describes the sm_80 kernels for head dims above 256 (sm80/wide_config.cuh).
void describe_wide(bool is_backward, Choice& choice) {
  const bool is_small = choice.smem_class == SmemClass::kSmall;
  const bool is_large = choice.smem_class == SmemClass::kLarge;
  choice.name = is_backward ? "two kernels, every modifier" : "columns, every modifier";
  choice.queries = is_backward || is_small ? 32 : 64;
  choice.keys = is_large && !is_backward ? 64 : 32;
}

Status choose_smem_class(const Forward& params, const Device& device, bool is_backward,
                         Choice& choice) {
  const Shape& shape = params.shape;
  const bool is_wide = choice.head_dim > kMaxUndividedHeadDim;
  const Options& options = params.options;
  const bool is_float32 = params.query.dtype == DType::kFloat32;
  int32_t bytes = device.smem_bytes;
  if (options.smem_limit > 0) bytes = std::min(bytes, options.smem_limit);
  const auto has = [&](SmemClass smem_class) {
    return bytes >= static_cast<int32_t>(smem_class) * 1024;
  };
  const auto set = [&](SmemClass smem_class, const char* reason) {
    choice.smem_class = smem_class;
    if (*choice.reason == '\0') choice.reason = reason;  // unless choose_family() had one
  };
  if (!has(SmemClass::kMedium)) {
    if (is_backward && (is_wide || (is_float32 && choice.head_dim > 128))) {
      return Status::unimplemented(
          std::string("jax_flash: the backward pass ") +
          (is_wide ? "above head dim 256" : "of float32 above head dim 128") +
          " needs 163 KB of shared memory for a block, and this GPU has " +
          std::to_string(bytes / 1024));
    }
    set(SmemClass::kSmall, "a block has less than 163 KB of shared memory");
  } else if (choice.head_dim == 192 && shape.value_dim <= 128) {
    set(SmemClass::kNarrow, "values have at most 128 columns");
  } else if (!(is_backward || is_float32 || is_wide) || !has(SmemClass::kLarge)) {
    set(SmemClass::kMedium, "a block has at least 163 KB of shared memory");
  } else {
    set(SmemClass::kLarge, "a block has at least 227 KB of shared memory");
  }
  choice.name = choice.general ? "every modifier" : "plain";
  if (is_wide) describe_wide(is_backward, choice);
  return {};
}

// Returns whether the accumulators of the scores can start from the bias, which then needs no
// addition later. Q is multiplied by the scale beforehand, and this must be exact in bfloat16:
// hence the scale must be a power of two.
bool bias_in_scores(const Forward& params) {
  int exponent = 0;
  return JAX_FLASH_SM90_QUERY_STAGES > 1 && JAX_FLASH_SM90_OPTIMISTIC &&
         params.bias.dtype == DType::kBFloat16 &&
         std::frexp(params.options.scale, &exponent) == 0.5f && exponent > -14 && exponent <= 1;
}

// Returns whether the bias has elements of `bytes` bytes, float32 or the operands' 16-bit type, and
// the copy engine can read it.
bool bias_in_boxes(const Forward& params, int bytes) {
  return params.bias.dtype == (bytes == 4 ? DType::kFloat32 : params.query.dtype) &&
         sm90::has_vectors(params.bias, bytes, 16) && fits_tensor_map(params.shape, params.bias, 1);
}

// Returns whether the forward kernels for a bias alone can read this bias: a float32 bias in
// vectors of 16 bytes, which they count in 32 bits, or another one in boxes.
bool bias_in_vectors(const Forward& params) {
  const Operand& bias = params.bias;
  if (bias.dtype != DType::kFloat32) return bias_in_boxes(params, 2);
  const int64_t vectors = (params.shape.q_len * bias.row + params.shape.kv_len) / 4;
  // The last vector of a row may only have elements of the row, or padding.
  const bool whole =
      params.shape.kv_len % 4 == 0 || bias.row >= ceil_div(params.shape.kv_len, 4) * 4;
  return sm90::has_vectors(bias, 4, 16) && whole && vectors < UINT32_MAX;
}

using Found = std::pair<Recipe, const char*>;  // the recipe, and why it was chosen

// Returns the most query rows of a multiprocessor, if query tiles have `rows` rows. The time of a
// call grows with it, since other multiprocessors idle during the last tile.
int64_t most_rows(const Shape& shape, const Device& device, int32_t rows) {
  return ceil_div(query_tiles(shape, rows), device.multiprocessors) * rows;
}

// Returns whether tiles of 128 query rows need less time than tiles of 192, at head dims 64 and 96.
// The factor 17 / 16 accounts for the speed of larger tiles: in long calls they are 5% faster.
bool smaller_tiles_are_faster(const Shape& shape, const Device& device) {
  return most_rows(shape, device, 128) * 17 < most_rows(shape, device, 192) * 16;
}

// Returns whether tiles of 64 query rows, whose keys two warpgroups divide, need less time than
// tiles of 128. They take up to half more time per row. Causal query tiles differ in length:
// QueryTileSchedule gives each block equal shares, also of a few tiles, but not of one.
bool divided_keys_are_faster(const Forward& params, const Device& device) {
  if (!JAX_FLASH_SM90_SPLIT_KEYS) return false;
  const Shape& shape = params.shape;
  if (params.options.is_causal) return query_tiles(shape, 64) <= 2 * device.multiprocessors;
  return most_rows(shape, device, 64) * 3 < most_rows(shape, device, 128) * 2;
}

// Returns whether the products of a call that decoding takes need more time than its copies, and
// whether it has enough heads for the multiprocessors.
bool is_large_decode(const Shape& shape, const Device& device) {
  return shape.heads == shape.kv_heads && shape.q_len >= 32 && shape.kv_len >= 1024 &&
         3 * query_tiles(shape, 64) >= device.multiprocessors;
}

// Returns whether the diagonal is the right edge, and starts at a corner of a key tile.
bool ends_at_diagonal(const Forward& params) {
  const Options& options = params.options;
  return (options.is_causal || options.window_right == 0) && !params.query_offset && !params.window;
}

// Returns whether the kernel for one cut tile takes a causal call. The diagonal cuts one tile of
// each query tile, the last one. In longer calls the kernel for two cut tiles is as fast, and
// peaked logits cost it less.
bool one_edge(const Forward& params) {
  return ends_at_diagonal(params) && params.shape.kv_len <= 2048;
}

// Returns whether a window's left edge may forbid a key. Without an offset, positions begin at 0.
bool has_left_edge(const Forward& params) {
  const int32_t left = params.options.window_left;
  return left >= 0 && (params.query_offset || params.window || left < params.shape.q_len - 1);
}

// Returns whether both edges of a window cut one tile of 128 keys of each query tile: the right one
// is the diagonal, and the left one runs through corners of key tiles, or beside them.
bool edges_cut_two_tiles(const Forward& params) {
  const int32_t rest = params.options.window_left % 128;
  return has_left_edge(params) && (rest == 0 || rest == 127) && ends_at_diagonal(params);
}

// Returns whether a call of short sequences takes the kernels for any modifiers.
bool is_general_if_short(const Forward& params) {
  return modifiers_of(params) != kNoModifier && !has_key_mask_alone(params);
}

// Returns whether blocks that keep all keys of a head need less time than others, at head dim 64.
// There must be units for most multiprocessors, and without modifiers, at most a fifth of all time
// may be idle because the last units are few. Full calls of two tiles of 128 keys with little
// padding are as fast in the other kernels.
bool keys_fit_a_block(const Forward& params, const Device& device) {
  const Shape& shape = params.shape;
  const bool general = is_general_if_short(params);
  if (!sm90::ShortUnits::takes(shape, general)) return false;
  const int64_t units = sm90::ShortUnits(shape, general).units, sms = device.multiprocessors;
  if (units > INT32_MAX / 2 || units * 3 < sms * 2) return false;
  if (modifiers_of(params) != kNoModifier) return true;
  if (units > sms && units * 5 < ceil_div(units, sms) * sms * 4) return false;
  return banded(params.options) || shape.kv_len <= 224 || shape.kv_len > 256;
}

// Returns whether blocks that keep all keys of a head need less time than decoding, as measured on
// an H200 with many heads (TUNING.md).
bool has_few_keys(const Shape& shape) {
  return shape.q_len > 8 && shape.kv_len <= std::max(64, 3 * std::min(shape.q_len, 100));
}

// Returns whether the backward kernel whose blocks keep all operands of a head takes the call, at
// head dim 64. There must be units for most multiprocessors.
bool head_fits_a_block(const Backward& params, const Device& device) {
  const Shape& shape = params.shape;
  return sm90::takes_short_gradient(shape, is_general_if_short(params)) &&
         shape.batch * shape.heads * 3 >= int64_t{device.multiprocessors} * 2;
}

Found choose_plain(const Forward& params, int32_t head_dim, const Device& device) {
  const Shape& shape = params.shape;
  const Options& options = params.options;
  if (head_dim > kMaxUndividedHeadDim) {
    return {Recipe::kColumns, "above head dim 256 two consumers divide the columns of the output"};
  }
  const bool in_band = banded(options), left_edge = has_left_edge(params);
  // Two warpgroups that divide the keys of 64 queries also divide the tiles that an edge cuts: each
  // has at most one.
  const bool divided = divided_keys_are_faster(params, device);
  const bool divides_ahead = sm90::kHasScoresAhead && divided && !left_edge && head_dim <= 128;
  const bool fits_block = head_dim == 64 && keys_fit_a_block(params, device);
  if (sm90::takes_decode(shape) && !(divides_ahead && is_large_decode(shape, device)) &&
      !(fits_block && has_few_keys(shape))) {
    return {Recipe::kDecode, "there are few query rows"};
  }
  if (fits_block) return {Recipe::kShort, "all keys of a head fit a block"};
  if (divides_ahead) {
    return {Recipe::kSplitKeysAhead, "tiles of 128 rows leave multiprocessors idle"};
  }
  if (head_dim == 192 && shape.value_dim <= 128) {
    return {Recipe::kNarrowValues, "values have at most 128 columns"};
  }
  if (head_dim == 192) return {Recipe::kChained, "values have more than 128 columns"};
  if (head_dim > 128) return {Recipe::kChained, "there is one kernel for this head dim"};
  // If keys are divided, only a left edge leads here.
  const char* const otherwise =
      divided ? "a window has a left edge" : "smaller query tiles would not be faster";
  if (head_dim == 128) return {Recipe::kChained, otherwise};
  const bool smaller = smaller_tiles_are_faster(shape, device);
  const char* const idle = "tiles of 192 rows leave multiprocessors idle";
  if (head_dim == 96) {
    if (smaller) return {Recipe::kChainedPair, idle};
    return {Recipe::kChained, otherwise};
  }
  const bool one_tile = shape.kv_len <= 128;
  if (sm90::kHasScoresAhead && !divided && edges_cut_two_tiles(params)) {
    return {Recipe::kAheadLeftCut, "a window's edges cut the first and the last key tile"};
  }
  if (sm90::kHasScoresAhead && !left_edge && !one_tile) {
    if (one_edge(params)) return {Recipe::kAheadOneCut, "an edge cuts the last key tile"};
    if (in_band) return {Recipe::kAheadTwoCut, "an edge may cut the last two key tiles"};
    if (smaller) return {Recipe::kAheadOneCut, idle};
  }
  if (divided) return {Recipe::kSplitKeys, "there are few query tiles, and a left edge"};
  if (left_edge) return {Recipe::kChainedPair, "a window has a left edge"};
  if (smaller || in_band) return {Recipe::kChainedPair, "the keys fit one tile"};
  return {Recipe::kChained, "there are many query tiles that no edge cuts"};
}

// Chooses between masks as bits of keys, as bytes and as words. A kernel converts the bytes to
// words first if they cannot be read in vectors, or if enough batches and heads share them. Above
// head dim 128, where there are two stages of K, no kernel reads bytes.
Found choose_masked(const Forward& params, int32_t head_dim, const Device& device) {
  const Shape& shape = params.shape;
  // Three consumers take full calls of many query tiles, as without modifiers.
  const bool triple =
      head_dim == 64 && !banded(params.options) && !smaller_tiles_are_faster(shape, device);
  if (has_key_mask(params)) {
    return {triple ? Recipe::kKeyMaskTriple : Recipe::kKeyMask,
            "all queries of a head share the mask"};
  }
  if (head_dim <= 128) {
    const bool shared = sm90::MaskMatrices(shape, params.mask).shared(shape);
    if (!shared && sm90::mask_has_vectors(params, 8)) {
      return {Recipe::kMaskBytes, "few heads and batches share the mask"};
    }
  }
  if (triple && shape.kv_len > 1024) {
    return {Recipe::kMaskWordsTriple, "heads or batches share the mask, and the call is long"};
  }
  return {Recipe::kMaskWords, "heads or batches share the mask, or its rows are not aligned"};
}

// Returns the kernel for two modifiers, or null.
const sm90::RecipeRow* find_pair(const Forward& params, uint32_t modifiers, int32_t head_dim) {
  if (params.query.dtype != DType::kBFloat16 || params.relative_bias) return nullptr;
  for (const sm90::RecipeRow& row : sm90::kRecipes) {
    if (row.modifiers == modifiers && row.head_dim == head_dim && row.is_pair()) return &row;
  }
  return nullptr;
}

constexpr char kMaskAsSegments[] = "the mask of keys is read as segments";

Found choose_modified(const Forward& params, int32_t head_dim, const Device& device,
                      bool& mask_as_segments) {
  const Options& options = params.options;
  const bool is_bfloat16 = params.query.dtype == DType::kBFloat16;
  if (head_dim == 64 && keys_fit_a_block(params, device)) {
    return {has_key_mask_alone(params) ? Recipe::kShortKeyMask : Recipe::kShortEvery,
            "all keys of a head fit a block"};
  }
  if (head_dim == 96 && has_key_mask_alone(params)) return choose_masked(params, head_dim, device);
  if (head_dim != 64 && head_dim != 128 && head_dim != 256) {
    return {Recipe::kEvery, "this head dim has no kernel for one modifier"};
  }
  const uint32_t modifiers = modifiers_of(params);
  if (const sm90::RecipeRow* const pair = find_pair(params, modifiers, head_dim)) {
    return {pair->recipe, "the call has these two modifiers"};
  }
  const uint32_t with_segments = modifiers_with_segments(params);
  if (const sm90::RecipeRow* const pair = find_pair(params, with_segments, head_dim)) {
    mask_as_segments = true;
    return {pair->recipe, kMaskAsSegments};
  }
  switch (modifiers) {
    case kBias:
      if (!bias_in_vectors(params)) {
        return {Recipe::kEvery, "the bias is not aligned, or of the other 16-bit type"};
      }
      // This kernel has three consumers: short calls, which do not fill them, are 3% slower.
      if (head_dim == 64 && is_bfloat16 && bias_in_scores(params) &&
          query_tiles(params.shape, 192) >= device.multiprocessors) {
        return {Recipe::kBiasInScores, "the scale is a power of two, and the call is long"};
      }
      if (params.bias.dtype == DType::kFloat32) {
        return {Recipe::kBiasFloats, "the bias is float32"};
      }
      return {Recipe::kBiasBoxes, "the bias has 16 bits"};
    case kSoftCap:
      // The kernel with more keys per tile spills many registers in the code for tiles that an edge
      // cuts, so it takes calls with few such tiles.
      if (head_dim == 64 && is_bfloat16 &&
          (!banded(options) || (!has_left_edge(params) && params.shape.kv_len >= 8192))) {
        return {Recipe::kSoftCapLong, "an edge cuts few key tiles, or none"};
      }
      return {Recipe::kSoftCap, "the soft cap is the only modifier"};
    case kMask: return choose_masked(params, head_dim, device);
    case kDistance:
      // The kernel for slopes takes the running maximum from a row's first keys, without slopes.
      if (!params.relative_bias && is_bfloat16 && head_dim <= 128 && options.is_causal &&
          !has_left_edge(params) && !params.window) {
        return {Recipe::kSlopes, "slopes are the only modifier, and the call is causal"};
      }
      return {Recipe::kEvery, "a relative bias, or slopes without causal order or of float16"};
    case kSegments: return {Recipe::kSegments, "segments are the only modifier"};
    case kDropout:
      if (head_dim <= 128) return {Recipe::kDropout, "dropout is the only modifier"};
      return {Recipe::kEvery, "this head dim has no kernel for dropout alone"};
    default: return {Recipe::kEvery, "the call has several modifiers"};
  }
}

// Returns the index of the backward kernel that is compiled for these modifiers, or -1.
int32_t narrow_backward(const Backward& params, uint32_t modifiers, int32_t head_dim) {
  if (params.options.deterministic || params.relative_bias) return -1;
  for (int32_t row = 0; row < sm90::kNarrowBackwardCount; ++row) {
    const sm90::NarrowBackward& kernel = sm90::kNarrowBackward[row];
    if (kernel.modifiers == modifiers &&
        (kernel.bias_bytes == 0 || bias_in_boxes(params, kernel.bias_bytes)) &&
        (!kernel.key_mask || key_block_has_one_mask(params)) &&
        kernel.exists(head_dim, params.query.dtype == DType::kBFloat16)) {
      return row;
    }
  }
  return -1;
}

// Returns whether the FP8 kernels for a head dim take a call. They have no other sizes of values.
bool fits_float8(const Forward& params, int32_t head_dim) {
  const Shape& shape = params.shape;
  const bool narrow = head_dim == 192 && shape.value_dim == 128;
  const uint32_t with_segments = modifiers_with_segments(params);
  const uint32_t modifiers = with_segments ? with_segments : modifiers_of(params);
  return shape.head_dim == head_dim && (shape.value_dim == head_dim || narrow) &&
         (modifiers & ~uint32_t{kSegments | kSoftCap | kAnyScale}) == 0;
}

Found choose_float8(const Forward& params, bool& mask_as_segments) {
  const uint32_t modifiers = modifiers_of(params);
  mask_as_segments = modifiers_with_segments(params) != kNoModifier;
  if (mask_as_segments) return {Recipe::kFloat8Modified, kMaskAsSegments};
  if (modifiers == kNoModifier) return {Recipe::kFloat8, "the operands are float8"};
  if (modifiers == kAnyScale) {
    return {Recipe::kFloat8Modified, "the operands are float8, and the scale is not positive"};
  }
  return {Recipe::kFloat8Modified, "the operands are float8, with segments or a soft cap"};
}

// Describes the kernel of a recipe, for the instance of choice.head_dim.
Status set_recipe(Recipe recipe, Choice& choice) {
  choice.row = sm90::recipe_row(recipe, choice.head_dim);
  if (choice.row < 0) return Status::internal("jax_flash: a kernel was chosen that does not exist");
  const sm90::RecipeRow& row = sm90::kRecipes[choice.row];
  choice.name = row.name;
  choice.queries = row.queries();
  choice.keys = row.keys;
  return {};
}

}  // namespace

Status choose_forward(const Forward& params, int32_t family, const Device& device,
                      const FindInstance& find, Choice& choice) {
  if (Status status = check_call(params); !status.ok()) return status;
  choice.exact = multiplies_exactly(params.shape, params.options);
  const bool float32 = params.query.dtype == DType::kFloat32;
  const bool fits =
      !float32 && fits_copy_engine(params.shape, {&params.query}, {&params.key, &params.value});
  if (choose_decode(params, family, fits, device, find, choice)) return {};
  if (choose_float32(params, false, family, device, find, choice)) {
    return set_recipe(float32_recipe(params, choice), choice);
  }
  if (Status status = choose_family(params, family, fits, device, find, choice); !status.ok()) {
    return status;
  }
  const bool float8 = params.query.dtype == DType::kFloat8;
  // The workspace is that of decoding, which a library without this instance cannot choose.
  const bool decodes = float8 && sm80::takes_decode(params.shape, params.query.dtype);
  if (decodes || (float8 && !fits_float8(params, choice.head_dim))) return no_kernel(params.shape);
  if (choice.family == 80) {
    return choose_smem_class(params, device, false, choice);
  }
  const int32_t head_dim = choice.head_dim;
  bool& as_segments = choice.mask_as_segments;
  const auto [recipe, reason] = float8 ? choose_float8(params, as_segments)
                                : choice.general
                                    ? choose_modified(params, head_dim, device, as_segments)
                                    : choose_plain(params, head_dim, device);
  choice.reason = reason;
  return set_recipe(recipe, choice);
}

Status choose_backward(const Backward& params, int32_t family, const Device& device,
                       const FindInstance& find, Choice& choice) {
  if (Status status = check_call(params); !status.ok()) return status;
  choice.exact = multiplies_exactly(params.shape, params.options);
  for (const auto& [name, operand] : {std::pair<const char*, const Operand&>{"dout", params.dout},
                                      {"dquery", params.dquery},
                                      {"dkey", params.dkey},
                                      {"dvalue", params.dvalue}}) {
    if (Status status = check_operand(name, params.shape, operand); !status.ok()) return status;
  }
  const bool fits = params.query.dtype != DType::kFloat32 &&
                    fits_copy_engine(params.shape, {&params.query, &params.out, &params.dout},
                                     {&params.key, &params.value});
  if (choose_one_row(params, family, find, choice)) return {};
  if (choose_float32(params, true, family, device, find, choice)) {
    switch (float32_recipe(params, choice)) {
      case Recipe::kFloat32: choice.name = "two kernels, TF32"; break;
      case Recipe::kFloat32Elements: choice.name = "two kernels, TF32, bias and mask"; break;
      case Recipe::kFloat16Elements:
        choice.name = "two kernels, split float16, bias and mask";
        break;
      case Recipe::kFloat16Modified:
        choice.name = "two kernels, split float16, every modifier but segments";
        break;
      default: choice.name = "two kernels, TF32, every modifier but segments";  // kFloat32Modified
    }
    choice.queries = choice.keys = sm90::Float32Gradient::kTileRows;
    return {};
  }
  if (Status status = choose_family(params, family, fits, device, find, choice); !status.ok()) {
    return status;
  }
  if (choice.family == 80) {
    return choose_smem_class(params, device, true, choice);
  }
  const uint32_t with_segments = modifiers_with_segments(params);
  choice.one_kernel = fits_one_kernel(params.shape, choice.head_dim) && !choice.general &&
                      !params.options.deterministic;
  choice.in_a_block = choice.head_dim == 64 && head_fits_a_block(params, device);
  if (choice.in_a_block) {
    choice.name = is_general_if_short(params) ? "short, every modifier"
                  : choice.general            ? "short, mask of keys"
                                              : "short";
    choice.reason = "all of a head fits a block";
    choice.queries = choice.keys = 64;
  } else if (choice.one_kernel) {
    choice.name = "one kernel, narrow values";
    choice.reason = "values have at most 128 columns, so dK and dV of 128 keys fit the registers";
    choice.queries = 64;
    choice.keys = 128;
  } else if (choice.head_dim <= 128) {
    choice.reason = "dK and dV of 128 keys fit the registers of a block";
    choice.narrow = narrow_backward(params, modifiers_of(params), choice.head_dim);
    if (choice.narrow < 0 && with_segments) {
      choice.narrow = narrow_backward(params, with_segments, choice.head_dim);
      choice.mask_as_segments = choice.narrow >= 0;
      if (choice.mask_as_segments) choice.reason = kMaskAsSegments;
    }
    choice.name = choice.narrow < 0 ? "one kernel" : sm90::kNarrowBackward[choice.narrow].name;
    choice.queries = choice.head_dim <= 64 ? 128 : 64;
    choice.keys = 128;
  } else if (choice.head_dim > kMaxUndividedHeadDim) {
    choice.name = "three kernels";
    choice.reason = "above head dim 256 each of dK, dV and dQ takes half of the registers";
    choice.queries = choice.keys = 64;
  } else {
    choice.name = "two kernels";
    choice.reason = "above head dim 128 dK, dV and dQ do not fit the registers of a block";
    if (with_segments) {  // whose tiles are skipped, unlike those of a mask
      choice.mask_as_segments = true;
      choice.reason = kMaskAsSegments;
    }
    choice.queries = choice.keys = 64;
  }
  return {};
}

int64_t forward_workspace_bytes(const Shape& shape, DType dtype, const ForwardFeatures& features) {
  // A call that decodes has neither spans nor words of a mask, so these can have the same place.
  const int64_t decode_bytes = sm80::DecodeParts::bytes(shape, dtype);
  const bool masked = features.mask_matrices > 0, mask_of_keys = masked && features.mask_rows == 1;
  if (dtype == DType::kFloat8) {
    return sm80::takes_decode(shape, dtype)
               ? decode_bytes
               : sm90::Float8Workspace::bytes(shape, features.segments || mask_of_keys);
  }
  const int64_t span_bytes =
      features.segments || mask_of_keys ? SegmentSpans::bytes(shape) : int64_t{0};
  if (features.segments) return std::max(span_bytes, decode_bytes);
  if (dtype == DType::kFloat32) {  // the rest is for 16 bits
    sm90::Float32Tiles plan;
    return std::max(decode_bytes,
                    sm90::may_take_float32(shape, false, features.exact)
                        ? sm90::Float32Tiles::plan(shape, features.exact, nullptr, plan)
                        : 0);
  }
  int64_t bytes = masked ? sm90::MaskWords::bytes(shape, features.mask_matrices, features.mask_rows)
                         : sm90::DecodeWorkspace::bytes(shape);
  const bool is_matrix_alone = features.bias != masked && !mask_of_keys && !features.others;
  if (sm90::HalfValues::takes(shape, dtype, is_matrix_alone)) {
    bytes = align_part(bytes) + sm90::HalfValues::bytes(shape, features.value_matrices);
  }
  return std::max({bytes, span_bytes, decode_bytes});
}

int64_t forward_workspace_bytes(const Forward& params) {
  const Shape& shape = params.shape;
  const Options& options = params.options;
  const sm90::MaskMatrices mask(shape, params.mask);
  ForwardFeatures features;
  features.segments = bool{params.query_segment_ids};
  features.bias = bool{params.bias};
  features.others = options.logits_soft_cap > 0.0f || options.dropout_threshold != 0;
  features.mask_matrices = params.mask ? mask.matrices() : 0;
  features.mask_rows = mask.rows;
  features.value_matrices = sm90::ValueMatrices(shape, params.value).count();
  features.exact = options.high_precision;
  return forward_workspace_bytes(shape, params.query.dtype, features);
}

int64_t backward_workspace_bytes(const Shape& shape, const BackwardFeatures& features) {
  // The instance is not chosen yet. Up to the next multiple of 64 covers every instance's head dim.
  const int64_t head_dim = (std::max(shape.head_dim, shape.value_dim) + 63) / 64 * 64;
  BackwardWorkspace workspace;
  int64_t bytes = BackwardWorkspace::plan(shape, head_dim, features, nullptr, workspace);
  if (!features.is_float32) return bytes;
  if (!features.segments && sm90::may_take_float32(shape, true, features.exact)) {
    sm90::Float32Gradient tiles;
    bytes += sm90::Float32Gradient::plan(shape, features.exact, nullptr, tiles);
  }
  return std::max(bytes, sm80::DecodeParts::gradient_bytes(shape));
}

}  // namespace jax_flash
