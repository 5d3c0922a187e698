// A device that computes on the processor: tests run on it what runs on a GPU elsewhere.
//
// It registers through PyTorch's PrivateUse1 key. Its tensors have memory of their own, which is limited on request;
// every operator falls back to the processor's kernel. As on a GPU, an operator refuses to mix its tensors with those
// of the processor. Copies between host and device are counted.

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/TensorShape.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/alloc_cpu.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <atomic>
#include <set>
#include <string>

namespace {

constexpr auto KEY = c10::DeviceType::PrivateUse1;

std::atomic<int64_t> to_device{0}, to_host{0}, in_use{0}, limit{0}, calls{0};
thread_local int inside = 0; // copies that a fallback makes are none of the program's

std::atomic<bool> single{false}; // refuse numbers of double precision, as Apple's GPUs do

void check_type(std::optional<at::ScalarType> dtype) {
  TORCH_CHECK(
      !single || inside || c10::dtype_or_default(dtype) != at::kDouble,
      "Cannot convert to float64 because the stand-in device has only float32");
}

struct Inside {
  Inside() { ++inside; }
  ~Inside() { --inside; }
};

// ---- memory ---------------------------------------------------------------------------------------------------------
struct Block {
  void* data;
  int64_t size;
};

void release(void* held) {
  auto* block = static_cast<Block*>(held);
  in_use -= block->size;
  c10::free_cpu(block->data);
  delete block;
}

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    auto size = static_cast<int64_t>(bytes);
    calls++;
    if (limit > 0 && in_use + size > limit)
      TORCH_CHECK_WITH(OutOfMemoryError, false, "stand-in device out of memory. Tried to allocate ", size, " bytes");
    in_use += size;
    auto* block = new Block{bytes ? c10::alloc_cpu(bytes) : nullptr, size};
    return {block->data, block, &release, c10::Device(KEY, 0)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, std::size_t count) const override { default_copy_data(to, from, count); }
};

Memory memory;

at::Tensor empty_memory_format(
    c10::IntArrayRef size,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>,
    std::optional<at::Device>,
    std::optional<bool>,
    std::optional<at::MemoryFormat> format) {
  check_type(dtype);
  return at::detail::empty_generic(
      size, &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    c10::IntArrayRef size,
    c10::IntArrayRef stride,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>,
    std::optional<at::Device>,
    std::optional<bool>) {
  check_type(dtype);
  return at::detail::empty_strided_generic(
      size, stride, &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}

// ---- copies ---------------------------------------------------------------------------------------------------------
// The processor's view of the same memory.
at::Tensor seen(const at::Tensor& t) {
  if (t.device().type() != KEY)
    return t;
  auto plain = at::from_blob(
      t.data_ptr(), t.sizes(), t.strides(), [keep = t.storage()](void*) {}, t.options().device(at::kCPU));
  return t.is_conj() ? plain.conj() : plain;
}

void count(const at::Tensor& from, const at::Tensor& to) {
  if (inside || from.numel() == 0)
    return;
  if (from.device().type() != KEY)
    to_device++;
  else if (to.device().type() != KEY)
    to_host++;
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& to, bool) {
  count(self, to);
  Inside here;
  if (self.numel())
    seen(to).copy_(seen(self));
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& to) {
  to.resize_(self.sizes());
  return copy_from(self, to, false);
}

at::Scalar local_scalar_dense(const at::Tensor& self) {
  if (!inside)
    to_host++;
  return seen(self).item();
}

// ---- views ----------------------------------------------------------------------------------------------------------
at::Tensor as_strided(const at::Tensor& t, c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<int64_t> at_) {
  return at::native::as_strided_tensorimpl(t, size, stride, at_);
}

at::Tensor view(const at::Tensor& t, c10::IntArrayRef size) { return at::native::view(t, size); }

at::Tensor reshape_alias(const at::Tensor& t, c10::IntArrayRef size, c10::IntArrayRef stride) {
  return at::native::as_strided_tensorimpl(t, size, stride, t.storage_offset());
}

at::Tensor unfold(const at::Tensor& t, int64_t dim, int64_t size, int64_t step) {
  return at::native::unfold(t, dim, size, step);
}

at::Tensor view_as_real(const at::Tensor& t) { return at::native::view_as_real(t); }
at::Tensor view_as_complex(const at::Tensor& t) { return at::native::view_as_complex(t); }

const at::Tensor& resize(const at::Tensor& t, c10::IntArrayRef size, std::optional<at::MemoryFormat>) {
  auto* impl = t.unsafeGetTensorImpl();
  if (t.sizes() == size)
    return t;
  impl->set_sizes_contiguous(size);
  auto needed = static_cast<size_t>((t.numel() + t.storage_offset()) * t.dtype().itemsize());
  const auto& storage = t.storage();
  if (storage.nbytes() < needed) {
    auto grown = memory.allocate(needed);
    if (storage.nbytes())
      memory.copy_data(grown.get(), storage.data(), storage.nbytes());
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(grown));
    storage.unsafeGetStorageImpl()->set_nbytes(needed);
  }
  return t;
}

at::Tensor& set_source(
    at::Tensor& t, at::Storage source, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  auto* impl = t.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_sizes_and_strides(size, stride, offset);
  return t;
}

// ---- convolutions ---------------------------------------------------------------------------------------------------
at::Tensor on_device(const at::Tensor& t) {
  Inside here;
  return t.defined() ? t.to(c10::Device(KEY, 0)) : t;
}

at::Tensor cpu(const at::Tensor& t) { return t.defined() ? seen(t) : t; }

void refuse(const at::Tensor& t, const char* name) {
  TORCH_CHECK(
      !t.defined() || t.device().type() == KEY,
      "Expected all tensors to be on the same device, but ", name, " got a tensor of ", t.device());
}

at::Tensor convolution(
    const at::Tensor& x,
    const at::Tensor& weight,
    const std::optional<at::Tensor>& bias,
    c10::IntArrayRef stride,
    c10::IntArrayRef padding,
    c10::IntArrayRef dilation,
    bool transposed,
    c10::IntArrayRef output_padding,
    int64_t groups) {
  for (const auto& t : {x, weight, bias.value_or(at::Tensor())})
    refuse(t, "convolution");
  std::optional<at::Tensor> b;
  if (bias && bias->defined())
    b = seen(*bias);
  return on_device(
      at::convolution(seen(x), seen(weight), b, stride, padding, dilation, transposed, output_padding, groups));
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor& grad,
    const at::Tensor& x,
    const at::Tensor& weight,
    c10::IntArrayRef stride,
    c10::IntArrayRef padding,
    c10::IntArrayRef dilation,
    bool transposed,
    c10::IntArrayRef output_padding,
    int64_t groups,
    std::array<bool, 3> mask) {
  for (const auto& t : {grad, x, weight})
    refuse(t, "convolution_backward");
  std::vector<int64_t> bias{transposed ? weight.size(1) * groups : weight.size(0)};
  auto [a, b, c] = at::convolution_backward(
      cpu(grad), cpu(x), cpu(weight), at::OptionalIntArrayRef(bias), stride, padding, dilation, transposed,
      output_padding, groups, mask);
  return {on_device(a), on_device(b), on_device(c)};
}

// Its schema does not say that it changes the running statistics, which the general fallback would lose.
std::tuple<at::Tensor, at::Tensor, at::Tensor> batch_norm(
    const at::Tensor& x,
    const std::optional<at::Tensor>& weight,
    const std::optional<at::Tensor>& bias,
    const std::optional<at::Tensor>& mean,
    const std::optional<at::Tensor>& var,
    bool training,
    double momentum,
    double eps) {
  auto plain = [](const std::optional<at::Tensor>& t) -> std::optional<at::Tensor> {
    if (!t || !t->defined())
      return std::nullopt;
    refuse(*t, "native_batch_norm");
    return seen(*t);
  };
  auto [a, b, c] = at::native_batch_norm(
      seen(x), plain(weight), plain(bias), plain(mean), plain(var), training, momentum, eps);
  return {on_device(a), on_device(b), on_device(c)};
}

// ---- everything else ------------------------------------------------------------------------------------------------
// Operators of a GPU that take a number in a tensor of the processor without dimensions.
const std::set<std::string> TAKES_NUMBERS = {
    "add", "sub", "rsub", "mul", "div", "pow", "remainder", "fmod", "floor_divide", "eq", "ne", "lt", "le", "gt", "ge",
    "maximum", "minimum", "fmax", "fmin", "where", "masked_fill", "fill", "logical_and", "logical_or", "atan2",
    "addcmul", "addcdiv", "lerp", "_foreach_mul", "_foreach_div", "_foreach_add", "xlogy", "bitwise_and",
    "bitwise_or", "clamp", "clamp_min", "clamp_max",
};

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  auto name = op.schema().name();
  name = name.substr(name.find("::") + 2);
  auto base = !name.empty() && name.back() == '_' ? name.substr(0, name.size() - 1) : name;
  bool numbers = TAKES_NUMBERS.count(base) > 0, ours = false;
  std::vector<at::Tensor> theirs;
  auto look = [&](const at::Tensor& t) {
    if (!t.defined())
      return;
    if (t.device().type() == KEY)
      ours = true;
    else if (!(t.dim() == 0 && (numbers || t.unsafeGetTensorImpl()->is_wrapped_number())))
      theirs.push_back(t);
  };
  for (const auto& v : torch::jit::last(*stack, op.schema().arguments().size())) {
    if (v.isTensor())
      look(v.toTensor());
    else if (v.isTensorList())
      for (const auto& t : v.toTensorList())
        look(t);
    else if (v.isOptionalTensorList())
      for (const auto& t : v.toOptionalTensorList())
        if (t.get().toOptional<at::Tensor>())
          look(*t.get().toOptional<at::Tensor>());
  }
  TORCH_CHECK(
      theirs.empty() || !ours,
      "Expected all tensors to be on the same device, but ", op.schema().name(), " got a tensor of ",
      theirs.empty() ? c10::Device(KEY) : theirs[0].device(), " with shape ",
      theirs.empty() ? c10::IntArrayRef() : theirs[0].sizes());
  {
    Inside here;
    at::native::cpu_fallback(op, stack);
  }
  for (const auto& v : torch::jit::last(*stack, op.schema().returns().size()))
    if (v.isTensor() && v.toTensor().defined())
      check_type(v.toTensor().scalar_type());
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return calls > 0; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return at::detail::getDefaultCPUGenerator();
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::detail::createCPUGenerator(); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return c10::GetCPUAllocator(); }
  bool isPinnedPtr(const void*) const override { return false; }
};

Hooks hooks;

// One device with one stream, on which everything has been done when a call returns.
struct Guard final : c10::impl::DeviceGuardImplInterface {
  Guard() = default;
  explicit Guard(c10::DeviceType) {}
  c10::DeviceType type() const override { return KEY; }
  c10::Device exchangeDevice(c10::Device) const override { return {KEY, 0}; }
  c10::Device getDevice() const override { return {KEY, 0}; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const override { return c10::Stream(c10::Stream::DEFAULT, c10::Device(KEY, 0)); }
  c10::Stream getNewStream(c10::Device d, int) const override { return getStream(d); }
  c10::Stream exchangeStream(c10::Stream s) const override { return getStream(s.device()); }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
};

} // namespace

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty_memory_format);
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &local_scalar_dense);
  m.impl("as_strided", &as_strided);
  m.impl("view", &view);
  m.impl("_reshape_alias", &reshape_alias);
  m.impl("unfold", &unfold);
  m.impl("view_as_real", &view_as_real);
  m.impl("view_as_complex", &view_as_complex);
  m.impl("resize_", &resize);
  m.impl("set_.source_Storage_storage_offset", &set_source);
  m.impl("convolution_overrideable", &convolution);
  m.impl("convolution_backward_overrideable", &convolution_backward);
  m.impl("native_batch_norm", &batch_norm);
}

// ---- what tests call ------------------------------------------------------------------------------------------------
extern "C" {
void standin_register() {
  at::SetAllocator(KEY, &memory);
  at::RegisterPrivateUse1HooksInterface(&hooks);
}
int64_t standin_to_device() { return to_device; }
int64_t standin_to_host() { return to_host; }
int64_t standin_in_use() { return in_use; }
int64_t standin_allocations() { return calls; }
void standin_single(int on) { single = on != 0; }
void standin_limit(int64_t bytes) { limit = bytes; }
}
