// A device called "elsewhere" for tests: its tensors live in ordinary memory, but PyTorch treats them like those of a
// GPU. They have their own dispatch key, generators and autograd thread, and every kernel that sees them checks what
// CUDA's kernels check: all tensors are here (CPU tensors of 0 dimensions may join elementwise operations, and CPU
// tensors may be indices), generators belong to this device, and only a copy moves numbers. Then the CPU's kernel runs
// on the same memory, so results equal those of the CPU bit by bit. Waiting for the device and copies are counted.

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/transformers/attention.h>
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <map>
#include <mutex>
#include <set>
#include <string>

namespace {

using c10::Device;
using c10::DeviceType;
using c10::DispatchKey;
using c10::DispatchKeySet;
constexpr auto HERE = DeviceType::PrivateUse1;
const Device DEVICE(HERE, 0);

// --- memory ----------------------------------------------------------------------------------------------------------

void release(void* context) {
  delete static_cast<c10::Storage*>(context);
}

// The same memory under another device's name; it lives as long as either owner.
c10::DataPtr shared(const c10::Storage& storage, Device device) {
  return {storage.mutable_data(), new c10::Storage(storage), &release, device};
}

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t n) override {
    auto storage = c10::Storage(c10::Storage::use_byte_size_t(), n, c10::GetCPUAllocator(), true);
    return shared(storage, DEVICE);
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &release;
  }
  void copy_data(void* to, const void* from, size_t n) const override {
    default_copy_data(to, from, n);
  }
};
Memory memory;
REGISTER_ALLOCATOR(HERE, &memory)

// --- generators ------------------------------------------------------------------------------------------------------

struct GeneratorHere final : c10::GeneratorImpl {
  at::Generator inner;
  GeneratorHere(at::Generator inner)
      : c10::GeneratorImpl(DEVICE, DispatchKeySet(DispatchKey::PrivateUse1)), inner(std::move(inner)) {}
  void set_current_seed(uint64_t seed) override {
    inner.set_current_seed(seed);
  }
  void set_offset(uint64_t) override {
    TORCH_CHECK(false, "generators elsewhere have no offset");
  }
  uint64_t get_offset() const override {
    return 0;
  }
  uint64_t current_seed() const override {
    return inner.current_seed();
  }
  uint64_t seed() override {
    return inner.seed();
  }
  void set_state(const c10::TensorImpl& state) override {
    inner.unsafeGetGeneratorImpl()->set_state(state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return inner.unsafeGetGeneratorImpl()->get_state();
  }
  static DeviceType device_type() {
    return HERE;
  }

 private:
  GeneratorHere* clone_impl() const override {
    return new GeneratorHere(inner.clone());
  }
};

at::Generator& default_generator() {
  static auto generator = at::make_generator<GeneratorHere>(at::detail::createCPUGenerator());
  return generator;
}

// --- what PyTorch asks of a device -----------------------------------------------------------------------------------

struct Guard final : c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override {
    return HERE;
  }
  Device exchangeDevice(Device) const override {
    return DEVICE;
  }
  Device getDevice() const override {
    return DEVICE;
  }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  c10::Stream getStream(Device) const noexcept override {
    return c10::Stream(c10::Stream::DEFAULT, DEVICE);
  }
  c10::Stream getDefaultStream(Device) const override {
    return c10::Stream(c10::Stream::DEFAULT, DEVICE);
  }
  c10::Stream exchangeStream(c10::Stream) const noexcept override {
    return c10::Stream(c10::Stream::DEFAULT, DEVICE);
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return 1;
  }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override {
    return true;
  }
  bool queryStream(const c10::Stream&) const override {
    return true;
  }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return true;
  }
  bool hasPrimaryContext(c10::DeviceIndex) const override {
    return true;
  }
  c10::DeviceIndex deviceCount() const override {
    return 1;
  }
  c10::DeviceIndex getCurrentDevice() const override {
    return 0;
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return default_generator();
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override {
    return at::make_generator<GeneratorHere>(at::detail::createCPUGenerator());
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t n) const override {
    auto fresh = memory.allocate(n);
    memory.copy_data(fresh.get(), storage.data(), std::min(n, storage.nbytes()));
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(fresh));
    storage.unsafeGetStorageImpl()->set_nbytes(n);
  }
};
const bool hooked = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return true;
}();

// --- counts ----------------------------------------------------------------------------------------------------------

std::mutex lock;
std::map<std::string, int64_t> counted;

void count(const std::string& what) {
  const std::lock_guard<std::mutex> guard(lock);
  ++counted[what];
}

// Operations whose result has a size that depends on numbers, or that hand a number to the host: CUDA waits for them.
const std::set<std::string> WAITING{
    "aten::nonzero", "aten::masked_select", "aten::_unique", "aten::_unique2", "aten::unique_dim",
    "aten::unique_consecutive", "aten::repeat_interleave", "aten::equal", "aten::bincount", "aten::histc",
    "aten::_local_scalar_dense", "aten::is_nonzero", "aten::item"};

// --- the kernels -----------------------------------------------------------------------------------------------------

bool here(const at::Tensor& t) {
  return t.defined() && t.device().type() == HERE;
}

// A CPU tensor over the memory of one that is here.
at::Tensor mirror(const at::Tensor& t) {
  if (!here(t)) {
    return t;
  }
  const auto& storage = t.storage();
  auto impl = c10::make_intrusive<c10::TensorImpl>(
      c10::Storage(
          c10::Storage::use_byte_size_t(), storage.nbytes(), shared(storage, c10::kCPU), c10::GetCPUAllocator(), true),
      DispatchKeySet(DispatchKey::CPU),
      t.dtype());
  impl->set_sizes_and_strides(t.sizes(), t.strides(), t.storage_offset());
  auto result = at::Tensor(std::move(impl));
  if (t.is_conj()) {
    result._set_conj(true);
  }
  if (t.is_neg()) {
    result._set_neg(true);
  }
  if (t.unsafeGetTensorImpl()->is_wrapped_number()) {
    result.unsafeGetTensorImpl()->set_wrapped_number(true);
  }
  return result;
}

// A tensor that is here over the memory of a CPU tensor, or over `storage` for a view of one that was here before.
at::Tensor arrived(const at::Tensor& t, const c10::Storage* storage = nullptr) {
  if (!t.defined() || here(t)) {
    return t;
  }
  TORCH_CHECK(t.layout() == c10::kStrided, "only dense tensors live elsewhere, got ", t.layout());
  auto held = storage != nullptr ? *storage
                                 : c10::Storage(
                                       c10::Storage::use_byte_size_t(),
                                       t.storage().nbytes(),
                                       shared(t.storage(), DEVICE),
                                       &memory,
                                       true);
  auto impl = c10::make_intrusive<c10::TensorImpl>(
      std::move(held), DispatchKeySet(DispatchKey::PrivateUse1), t.dtype());
  impl->set_sizes_and_strides(t.sizes(), t.strides(), t.storage_offset());
  return at::Tensor(std::move(impl));
}

// What was written through a mirror: its size and memory may be new.
void written(const at::Tensor& original, const at::Tensor& image) {
  if (image.storage().data() != original.storage().data() || image.storage().nbytes() != original.storage().nbytes()) {
    auto* impl = original.storage().unsafeGetStorageImpl();
    impl->set_data_ptr_noswap(shared(image.storage(), DEVICE));
    impl->set_nbytes(image.storage().nbytes());
  }
  if (image.sizes() != original.sizes() || image.strides() != original.strides() ||
      image.storage_offset() != original.storage_offset()) {
    original.unsafeGetTensorImpl()->set_sizes_and_strides(image.sizes(), image.strides(), image.storage_offset());
  }
}

struct Argument {
  at::Tensor original;
  at::Tensor image;
  const c10::AliasInfo* alias;
};

// Where CUDA takes CPU tensors beside its own.
bool allowed(const c10::OperatorHandle& op, const c10::Argument& argument, const at::Tensor& t) {
  const auto& name = op.schema().name();
  if (argument.alias_info() != nullptr && argument.alias_info()->isWrite()) {
    return false;
  }
  const bool indexing = name == "aten::index" || name == "aten::index_put_" || name == "aten::index_put" ||
      name == "aten::_index_put_impl_";
  if (indexing && (argument.name() == "indices" || (argument.name() == "values" && t.dim() == 0))) {
    return true;
  }
  const bool filling = name == "aten::fill_" || name == "aten::fill" || name == "aten::masked_fill_" ||
      name == "aten::masked_fill" || name == "aten::where" || name == "aten::clamp" ||
      name == "aten::floor_divide" || name == "aten::floor_divide_";  // pointwise, though it has no such tag
  return t.dim() == 0 && (filling || op.hasTag(at::Tag::pointwise));
}

void kernel(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto inputs = schema.arguments().size();
  const auto begin = stack->size() - inputs;
  std::vector<Argument> seen;
  bool boolean_index = false;
  bool tensors_here = false;
  for (size_t k = 0; k < inputs; ++k) {
    const auto& value = (*stack)[begin + k];
    const auto any = [&](const at::Tensor& t) { tensors_here = tensors_here || here(t); };
    if (value.isTensor()) {
      any(value.toTensor());
    } else if (value.isTensorList()) {
      for (const at::Tensor& t : value.toTensorVector()) {
        any(t);
      }
    } else if (value.isOptionalTensorList()) {
      for (const std::optional<at::Tensor>& t : value.toOptionalTensorVector()) {
        any(t.value_or(at::Tensor()));
      }
    } else if (value.isDevice()) {
      tensors_here = tensors_here || value.toDevice().type() == HERE;
    }
  }
  for (size_t k = 0; k < inputs; ++k) {
    auto& value = (*stack)[begin + k];
    const auto& argument = schema.arguments()[k];
    const auto take = [&](const at::Tensor& t) {
      if (!t.defined()) {
        return t;
      }
      if (!here(t) && tensors_here) {
        TORCH_CHECK(
            t.device().is_cpu() && allowed(op, argument, t),
            "Expected all tensors to be on the same device, but argument '", argument.name(), "' of ", schema.name(),
            " is on ", t.device(), " while others are elsewhere");
      }
      boolean_index = boolean_index || (argument.name() == "indices" && t.scalar_type() == at::kBool);
      auto image = mirror(t);
      seen.push_back({t, image, argument.alias_info()});
      return image;
    };
    if (value.isTensor()) {
      value = take(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> images;
      for (const at::Tensor& t : value.toTensorVector()) {
        images.push_back(take(t));
      }
      value = images;
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> images;
      for (const std::optional<at::Tensor>& t : value.toOptionalTensorVector()) {
        images.push_back(t.has_value() ? std::optional<at::Tensor>(take(*t)) : std::nullopt);
      }
      value = images;
    } else if (value.isGenerator()) {
      auto generator = value.toGenerator();
      TORCH_CHECK(
          generator.device().type() == HERE,
          "Expected a generator of device elsewhere for ", schema.name(), ", found one of ", generator.device());
      TORCH_CHECK(tensors_here, "Expected a generator of device cpu for ", schema.name(), ", found one of elsewhere");
      value = c10::IValue(generator.get<GeneratorHere>()->inner);
    } else if (value.isDevice() && value.toDevice().type() == HERE) {
      value = c10::IValue(Device(c10::kCPU));
    } else if (value.isNone() && argument.type()->str().find("Generator") != std::string::npos) {
      value = c10::IValue(default_generator().get<GeneratorHere>()->inner);
    }
  }
  if (boolean_index || WAITING.count(schema.name()) > 0) {
    count(boolean_index ? "aten::index (mask)" : schema.name());
  }
  op.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), stack);
  for (const auto& each : seen) {
    if (each.alias != nullptr && each.alias->isWrite() && here(each.original)) {
      written(each.original, each.image);
    }
  }
  const auto outputs = schema.returns().size();
  const auto first = stack->size() - outputs;
  for (size_t k = 0; k < outputs; ++k) {
    auto& value = (*stack)[first + k];
    const auto* alias = schema.returns()[k].alias_info();
    const auto give = [&](const at::Tensor& t) {
      if (alias != nullptr && t.defined()) {
        for (const auto& each : seen) {
          if (alias->isWrite() && each.image.is_same(t)) {
            return each.original;
          }
        }
        for (const auto& each : seen) {
          if (each.alias != nullptr && here(each.original) && each.image.storage().data() == t.storage().data()) {
            return arrived(t, &each.original.storage());
          }
        }
      }
      return arrived(t);
    };
    if (value.isTensor()) {
      value = give(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> given;
      for (const at::Tensor& t : value.toTensorVector()) {
        given.push_back(give(t));
      }
      value = given;
    }
  }
}

at::Tensor empty(
    c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
    std::optional<Device> device, std::optional<bool> pinned, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(
      size, &memory, DispatchKeySet(DispatchKey::PrivateUse1), c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
    std::optional<at::Layout> layout, std::optional<Device> device, std::optional<bool> pinned) {
  return at::detail::empty_strided_generic(
      size, stride, &memory, DispatchKeySet(DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}

// The zeros of forward-mode derivatives: a size without memory.
at::Tensor efficient_zeros(
    c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
    std::optional<Device> device, std::optional<bool> pinned) {
  struct Nothing final : c10::Allocator {
    c10::DataPtr allocate(size_t) override {
      return {nullptr, nullptr, &c10::detail::deleteNothing, DEVICE};
    }
    c10::DeleterFnPtr raw_deleter() const override {
      return &c10::detail::deleteNothing;
    }
    void copy_data(void*, const void*, size_t) const override {}
  };
  static Nothing nothing;
  return at::detail::empty_generic(
      size, &nothing, DispatchKeySet(DispatchKey::PrivateUse1) | DispatchKeySet(DispatchKey::ZeroTensor),
      c10::dtype_or_default(dtype), std::nullopt);
}

at::Tensor& copy(at::Tensor& self, const at::Tensor& from, bool non_blocking) {
  if (here(self) != here(from)) {
    count(here(self) ? "upload" : "download");
  }
  auto target = mirror(self);
  target.copy_(mirror(from), non_blocking);
  return self;
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  auto target = to;
  copy(target, from, non_blocking);
  return to;
}

at::Scalar local_scalar(const at::Tensor& self) {
  count("aten::_local_scalar_dense");
  return at::_local_scalar_dense(mirror(self));
}

at::Tensor& set_source(
    at::Tensor& self, at::Storage source, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  std::vector<int64_t> strides(stride.begin(), stride.end());
  if (stride.empty() && !size.empty()) {
    strides.assign(size.size(), 1);
    for (size_t k = size.size() - 1; k > 0; --k) {
      strides[k - 1] = strides[k] * size[k];
    }
  }
  impl->set_sizes_and_strides(size, strides, offset);
  return self;
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source) {
  const auto size = static_cast<int64_t>(source.nbytes() / self.itemsize());
  return set_source(self, std::move(source), 0, {size}, {1});
}

bool together(const at::Tensor& a, const at::Tensor& b, const char* what) {
  TORCH_CHECK(here(a) && here(b), "Expected all tensors to be on the same device for ", what);
  return true;
}

at::Tensor convolution(
    const at::Tensor& x, const at::Tensor& w, const std::optional<at::Tensor>& b, c10::IntArrayRef stride,
    c10::IntArrayRef padding, c10::IntArrayRef dilation, bool transposed, c10::IntArrayRef output_padding,
    int64_t groups) {
  together(x, w, "convolution");
  std::optional<at::Tensor> bias;
  if (b.has_value() && b->defined()) {
    together(x, *b, "convolution");
    bias = mirror(*b);
  }
  return arrived(at::convolution(
      mirror(x), mirror(w), bias, stride, padding, dilation, transposed, output_padding, groups));
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor& g, const at::Tensor& x, const at::Tensor& w, c10::IntArrayRef stride, c10::IntArrayRef padding,
    c10::IntArrayRef dilation, bool transposed, c10::IntArrayRef output_padding, int64_t groups,
    std::array<bool, 3> mask) {
  together(x, w, "convolution_backward");
  together(x, g, "convolution_backward");
  std::vector<int64_t> bias{w.size(transposed ? 1 : 0) * (transposed ? groups : 1)};
  auto [dx, dw, db] = at::convolution_backward(
      mirror(g), mirror(x), mirror(w), c10::OptionalIntArrayRef(bias), stride, padding, dilation, transposed,
      output_padding, groups, mask);
  return {arrived(dx), arrived(dw), arrived(db)};
}

// The recurrent cells that PyTorch uses on GPUs in place of the CPU's separate operations. Gates in the order i, f, g, o.
std::tuple<at::Tensor, at::Tensor, at::Tensor> lstm_cell(
    const at::Tensor& x, const at::Tensor& h, const at::Tensor& c, const std::optional<at::Tensor>& bx,
    const std::optional<at::Tensor>& bh) {
  auto gates = mirror(x) + mirror(h);
  if (bx.has_value() && bx->defined()) {
    gates = gates + mirror(*bx) + mirror(*bh);
  }
  auto parts = gates.chunk(4, 1);
  auto i = parts[0].sigmoid(), f = parts[1].sigmoid(), g = parts[2].tanh(), o = parts[3].sigmoid();
  auto cy = f * mirror(c) + i * g;
  return {arrived(o * cy.tanh()), arrived(cy), arrived(at::cat({i, f, g, o}, 1))};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> lstm_cell_backward(
    const std::optional<at::Tensor>& grad_h, const std::optional<at::Tensor>& grad_c, const at::Tensor& cx,
    const at::Tensor& cy, const at::Tensor& workspace, bool has_bias) {
  auto c = mirror(cy), before = mirror(cx);
  const auto given = [&](const std::optional<at::Tensor>& g) {
    return g.has_value() && g->defined() ? mirror(*g) : at::zeros_like(c);
  };
  auto gates = mirror(workspace).chunk(4, 1);
  auto i = gates[0], f = gates[1], g = gates[2], o = gates[3], t = c.tanh(), gh = given(grad_h);
  auto gc = given(grad_c) + gh * o * (1 - t * t);
  auto all = at::cat({gc * g * i * (1 - i), gc * before * f * (1 - f), gc * i * (1 - g * g), gh * t * o * (1 - o)}, 1);
  return {arrived(all), arrived(gc * f), has_bias ? arrived(all.sum(0)) : at::Tensor()};
}

// Gates in the order r, z, n.
std::tuple<at::Tensor, at::Tensor> gru_cell(
    const at::Tensor& x, const at::Tensor& h, const at::Tensor& hx, const std::optional<at::Tensor>& bx,
    const std::optional<at::Tensor>& bh) {
  auto from_x = mirror(x), from_h = mirror(h), before = mirror(hx);
  if (bx.has_value() && bx->defined()) {
    from_x = from_x + mirror(*bx);
    from_h = from_h + mirror(*bh);
  }
  auto a = from_x.chunk(3, 1), b = from_h.chunk(3, 1);
  auto r = (a[0] + b[0]).sigmoid(), z = (a[1] + b[1]).sigmoid(), n = (a[2] + r * b[2]).tanh();
  return {arrived(n + z * (before - n)), arrived(at::cat({r, z, n, before, b[2]}, 1))};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor> gru_cell_backward(
    const at::Tensor& grad, const at::Tensor& workspace, bool has_bias) {
  auto g = mirror(grad);
  auto kept = mirror(workspace).chunk(5, 1);
  auto r = kept[0], z = kept[1], n = kept[2], before = kept[3], hidden = kept[4];
  auto gz = g * (before - n) * z * (1 - z), gn = g * (1 - z) * (1 - n * n), gr = gn * hidden * r * (1 - r);
  auto to_x = at::cat({gr, gz, gn}, 1), to_h = at::cat({gr, gz, gn * r}, 1);
  const auto bias = [&](const at::Tensor& t) { return has_bias ? arrived(t.sum(0)) : at::Tensor(); };
  return {arrived(to_x), arrived(to_h), arrived(g * z), bias(to_x), bias(to_h)};
}

int64_t attention_by_math(
    const at::Tensor&, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&, double, bool,
    std::optional<double>, bool) {
  return 0;  // SDPBackend::math
}

void reset() {
  const std::lock_guard<std::mutex> guard(lock);
  counted.clear();
}

c10::Dict<std::string, int64_t> counts() {
  const std::lock_guard<std::mutex> guard(lock);
  c10::Dict<std::string, int64_t> result;
  for (const auto& [name, times] : counted) {
    result.insert(name, times);
  }
  return result;
}

void seed(int64_t value) {
  default_generator().set_current_seed(static_cast<uint64_t>(value));
}

at::Tensor state() {
  return at::Tensor(default_generator().unsafeGetGeneratorImpl()->get_state());
}

void set_state(const at::Tensor& value) {
  default_generator().unsafeGetGeneratorImpl()->set_state(*value.unsafeGetTensorImpl());
}

}  // namespace

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &attention_by_math)
}

TORCH_LIBRARY(elsewhere, m) {
  m.def("reset", &reset);
  m.def("counts", &counts);
  m.def("seed", &seed);
  m.def("state", &state);
  m.def("set_state", &set_state);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&kernel>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_efficientzerotensor", &efficient_zeros);
  m.impl("copy_", &copy);
  m.impl("_copy_from", &copy_from);
  m.impl("_local_scalar_dense", &local_scalar);
  m.impl("set_.source_Storage_storage_offset", &set_source);
  m.impl("set_.source_Storage", &set_storage);
  m.impl("convolution_overrideable", &convolution);
  m.impl("convolution_backward_overrideable", &convolution_backward);
  m.impl("_thnn_fused_lstm_cell", &lstm_cell);
  m.impl("_thnn_fused_lstm_cell_backward_impl", &lstm_cell_backward);
  m.impl("_thnn_fused_gru_cell", &gru_cell);
  m.impl("_thnn_fused_gru_cell_backward", &gru_cell_backward);
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  KERNEL_PRIVATEUSEONE(linear, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(matmul, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(mm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(bmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(addmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(baddbmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(conv1d, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(conv2d, lower_precision_fp)
}
