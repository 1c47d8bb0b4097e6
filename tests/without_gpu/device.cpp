// A device that torch takes for a GPU, in a build of torch that knows none: its memory is the host's, and its operations are those
// of the CPU on the same bytes. What a GPU would refuse, it refuses, too: tensors of two devices in one operation, values that are
// read and memory that is not pinned while a graph is recorded. New memory is full of NaN.
//
//   tensor of "cuda"  --here-->  the same bytes as a tensor of the CPU  --the CPU's kernel-->  result  --there-->  tensor of "cuda"
//
// It must be loaded before torch is imported, since torch asks only once whether there is a GPU.

#include <torch/extension.h>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <string>

namespace {
using at::IntArrayRef;
using at::Tensor;
using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::Stream;
const Device kDevice(DeviceType::CUDA, 0);
const c10::DispatchKeySet kKeys(c10::DispatchKey::CUDA);
constexpr size_t kLine = 512;  // memory is given in pieces of so many bytes, as on a GPU

// Memory ------------------------------------------------------------------------------------------------------------------------

std::mutex lock;
int64_t held = 0, peak = 0, count = 0;
std::set<const void*> pinned;

void release(void* block) {
  std::lock_guard<std::mutex> guard(lock);
  held -= *static_cast<int64_t*>(block);
  --count;
  std::free(block);
}

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    int64_t room = (bytes + kLine - 1) / kLine * kLine;
    auto* block = static_cast<char*>(std::aligned_alloc(kLine, room + kLine));
    *reinterpret_cast<int64_t*>(block) = room;
    std::memset(block + kLine, 0xFF, room);
    std::lock_guard<std::mutex> guard(lock);
    held += room;
    ++count;
    peak = std::max(peak, held);
    return {bytes ? block + kLine : nullptr, block, &release, kDevice};
  }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
} memory;

void unpin(void* block) {
  std::lock_guard<std::mutex> guard(lock);
  pinned.erase(block);
  std::free(block);
}

struct Pinned final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* block = std::aligned_alloc(kLine, (bytes / kLine + 1) * kLine);
    std::lock_guard<std::mutex> guard(lock);
    pinned.insert(block);
    return {block, block, &unpin, Device(DeviceType::CPU)};
  }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
} pinning;

// Random numbers ----------------------------------------------------------------------------------------------------------------

struct Random final : c10::GeneratorImpl {
  at::Generator inner;
  explicit Random(at::Generator one) : c10::GeneratorImpl(kDevice, kKeys), inner(std::move(one)) {}
  void set_current_seed(uint64_t seed) override { inner.set_current_seed(seed); }
  void set_offset(uint64_t offset) override { inner.set_offset(offset); }
  uint64_t get_offset() const override { return inner.get_offset(); }
  uint64_t current_seed() const override { return inner.current_seed(); }
  uint64_t seed() override { return inner.seed(); }
  void set_state(const c10::TensorImpl& state) override { inner.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return inner.unsafeGetGeneratorImpl()->get_state(); }
  Random* clone_impl() const override { return new Random(inner.clone()); }
};

const at::Generator& standard() {
  static at::Generator one = at::make_generator<Random>(at::detail::createCPUGenerator(c10::default_rng_seed_val));
  return one;
}

at::Generator inner(const at::Generator& one) { return static_cast<Random*>(one.unsafeGetGeneratorImpl())->inner; }

// The device's numbers in the place of the CPU's, for operations that take no generator.
struct Lent {
  c10::GeneratorImpl* cpu = nullptr;
  c10::intrusive_ptr<c10::TensorImpl> before;
  explicit Lent(bool draws) {
    if (!draws) return;
    cpu = at::detail::getDefaultCPUGenerator().unsafeGetGeneratorImpl();
    before = cpu->get_state();
    cpu->set_state(*standard().unsafeGetGeneratorImpl()->get_state());
  }
  ~Lent() {
    if (!cpu) return;
    standard().unsafeGetGeneratorImpl()->set_state(*cpu->get_state());
    cpu->set_state(*before);
  }
};

// What torch asks a device ------------------------------------------------------------------------------------------------------

struct Guard final : c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return DeviceType::CUDA; }
  DeviceIndex deviceCount() const noexcept override { return 1; }
  Device getDevice() const override { return kDevice; }
  Device exchangeDevice(Device) const override { return kDevice; }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  Stream getStream(Device) const noexcept override { return Stream(Stream::UNSAFE, kDevice, 0); }
  Stream getDefaultStream(Device) const override { return Stream(Stream::UNSAFE, kDevice, 0); }
  Stream exchangeStream(Stream one) const noexcept override { return one; }
  void record(void**, const Stream&, const DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const DeviceIndex) const override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const Stream&) const override {}
} guard;
c10::impl::DeviceGuardImplRegistrar registrar(DeviceType::CUDA, &guard);

struct Hooks final : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasCUDART() const override { return true; }
  int getNumGPUs() const override { return 1; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex current_device() const override { return 0; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  DeviceIndex exchangeDevice(DeviceIndex) const override { return 0; }
  DeviceIndex maybeExchangeDevice(DeviceIndex) const override { return 0; }
  void setCurrentDevice(DeviceIndex) const override {}
  void deviceSynchronize(DeviceIndex) const override {}
  Device getDeviceFromPtr(void*) const override { return kDevice; }
  bool isPinnedPtr(const void* place) const override {
    std::lock_guard<std::mutex> guard(lock);
    return pinned.count(place);
  }
  const at::Generator& getDefaultGenerator(DeviceIndex) const override { return standard(); }
  at::Generator getNewGenerator(DeviceIndex) const override { return at::make_generator<Random>(at::detail::createCPUGenerator()); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinning; }
  c10::Allocator* getCUDADeviceAllocator() const override { return &memory; }
};
}  // namespace

namespace at {
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, Hooks)
}

namespace {

// Tensors here and there --------------------------------------------------------------------------------------------------------

Tensor here(const Tensor& t) {
  if (!t.defined() || !t.is_cuda()) return t;
  c10::Storage storage(c10::Storage::use_byte_size_t(), t.storage().nbytes(),
                       c10::DataPtr(const_cast<void*>(t.storage().data()), Device(DeviceType::CPU)), c10::GetCPUAllocator(), true);
  Tensor same = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), t.dtype());
  same.unsafeGetTensorImpl()->set_sizes_and_strides(t.sizes(), t.strides(), t.storage_offset());
  if (t.unsafeGetTensorImpl()->is_wrapped_number()) same.unsafeGetTensorImpl()->set_wrapped_number(true);
  return same;
}

Tensor there(const Tensor& t) {
  if (!t.defined() || t.is_cuda()) return t;
  Tensor made = at::detail::empty_strided_generic(t.sizes(), t.strides(), &memory, kKeys, t.scalar_type());
  at::AutoDispatchBelowAutograd below;
  if (t.numel()) here(made).copy_(t);
  return made;
}

const Tensor& resize_(const Tensor& self, IntArrayRef size, std::optional<at::MemoryFormat>) {
  auto* impl = self.unsafeGetTensorImpl();
  auto& storage = impl->unsafe_storage();
  size_t bytes = (c10::multiply_integers(size) + self.storage_offset()) * self.itemsize();
  if (bytes > storage.nbytes()) {
    auto fresh = memory.allocate(bytes);
    if (storage.nbytes()) std::memcpy(fresh.get(), storage.data(), storage.nbytes());
    storage.set_data_ptr_noswap(std::move(fresh));
    storage.set_nbytes(bytes);
  }
  impl->set_sizes_contiguous(size);
  return self;
}

// Graphs: each operation again, into the memory of its first results. Recording itself changes nothing that was there before. ----

using Steps = std::vector<std::function<void()>>;
Steps* recording = nullptr;
std::map<const void*, std::pair<c10::Storage, std::string>> before;
c10::intrusive_ptr<c10::TensorImpl> random_before;

void keep(const Tensor& t) {
  if (!recording || !t.defined() || !t.is_cuda()) return;
  const void* key = t.storage().unsafeGetStorageImpl();
  if (!before.count(key))
    before.emplace(key, std::make_pair(t.storage(), std::string(static_cast<const char*>(t.storage().data()), t.storage().nbytes())));
}

void record() {
  before.clear();
  recording = new Steps();
  random_before = standard().unsafeGetGeneratorImpl()->get_state();
}

int64_t end() {
  for (auto& [key, was] : before) std::memcpy(const_cast<void*>(was.first.data()), was.second.data(), was.second.size());
  before.clear();
  standard().unsafeGetGeneratorImpl()->set_state(*random_before);
  return reinterpret_cast<int64_t>(std::exchange(recording, nullptr));
}

// Waits: what makes the host stop until a GPU is done, as torch.cuda.set_sync_debug_mode finds it --------------------------------------

int64_t waits = 0;
int quiet = 0;  // above 0 within formulas, whose own reads no GPU would make
int mode = 0;   // 0: count, 2: refuse

void wait_for(const std::string& what) {
  if (quiet > 0) return;
  ++waits;
  TORCH_CHECK(mode < 2, "called a synchronizing CUDA operation (", what, ")");
}

// Operations whose result has a size that only the device knows.
const std::set<std::string> kSized = {"aten::nonzero",      "aten::masked_select", "aten::_unique2",       "aten::unique_dim",
                                      "aten::unique_consecutive", "aten::bincount",      "aten::histc"};
const std::set<std::string> kIndexed = {"aten::index", "aten::index_put_", "aten::_index_put_impl_", "aten::index_put"};

void note_waits(const std::string& name, const std::vector<c10::IValue>& args) {
  if (kSized.count(name)) wait_for(name);
  if (name == "aten::repeat_interleave" && args.size() == 2 && args[1].isNone()) wait_for(name + " without output_size");
  if (kIndexed.count(name))
    for (const c10::IValue& one : args[1].toListRef())
      if (one.isTensor() && (one.toTensor().scalar_type() == at::kBool || one.toTensor().scalar_type() == at::kByte))
        wait_for(name + " by a mask");
  if (name == "aten::_foreach_copy_" && !args[2].toBool() && args[0].toTensorVector()[0].device() != args[1].toTensorVector()[0].device())
    wait_for(name);
}

// Operations --------------------------------------------------------------------------------------------------------------------

// Those which take tensors of two devices.
const std::set<std::string> kMixed = {"aten::_to_copy", "aten::index", "aten::index_put_", "aten::_index_put_impl_", "aten::index_put",
                                      "aten::_foreach_copy_"};

void run(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto& inputs = schema.arguments();
  const auto args = torch::jit::last(*stack, inputs.size()).vec();
  auto cpu = args;
  bool ours = false, theirs = false;
  std::vector<std::pair<Tensor, Tensor>> written;  // on the device, here
  for (size_t i = 0; i < args.size(); ++i) {
    const auto* alias = inputs[i].alias_info();
    const auto convert = [&](const Tensor& t) {
      if (!t.defined()) return t;
      ours = ours || t.is_cuda();
      theirs = theirs || (t.device().is_cpu() && t.dim() > 0);
      Tensor same = here(t);
      if (alias && alias->isWrite()) keep(t), written.emplace_back(t, same);
      return same;
    };
    const auto& arg = args[i];
    if (arg.isTensor()) {
      cpu[i] = convert(arg.toTensor());
    } else if (arg.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& t : arg.toTensorVector()) list.push_back(convert(t));
      cpu[i] = list;
    } else if (arg.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> list;
      for (const c10::IValue& t : arg.toListRef()) list.push_back(t.isNone() ? std::nullopt : std::make_optional(convert(t.toTensor())));
      cpu[i] = list;
    } else if (arg.isDevice() && arg.toDevice().is_cuda()) {
      ours = true;
      cpu[i] = Device(DeviceType::CPU);
    } else if (arg.isGenerator()) {
      TORCH_CHECK(arg.toGenerator().device().is_cuda(), "Expected a 'cuda' device type for generator but found 'cpu'");
      cpu[i] = inner(arg.toGenerator());
    } else if (arg.isNone() && inputs[i].type()->str().find("Generator") != std::string::npos) {
      cpu[i] = inner(standard());
    }
  }
  const std::string name = op.operator_name().name;
  TORCH_CHECK(!ours || !theirs || kMixed.count(name),
              "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu! (in ", name, ")");
  if (ours) note_waits(name, args);
  torch::jit::drop(*stack, args.size());
  std::vector<std::vector<int64_t>> sizes;
  for (auto& [t, same] : written) sizes.push_back(same.sizes().vec());
  {
    at::AutoDispatchBelowAutograd below;
    Lent numbers(name.find("dropout") != std::string::npos);
    for (auto& arg : cpu) stack->push_back(std::move(arg));
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
    for (size_t k = 0; k < written.size(); ++k) {  // a result for which there was no room yet
      auto& [t, same] = written[k];
      if (!t.is_cuda() || same.sizes() == IntArrayRef(sizes[k])) continue;
      resize_(t, same.sizes(), std::nullopt);
      t.unsafeGetTensorImpl()->set_sizes_and_strides(same.sizes(), same.strides(), same.storage_offset());
      if (same.numel()) here(t).copy_(same);
    }
  }
  auto results = torch::jit::last(*stack, schema.returns().size()).vec();
  torch::jit::drop(*stack, results.size());
  for (size_t i = 0; i < results.size(); ++i) {
    const auto* alias = schema.returns()[i].alias_info();
    if (results[i].isTensor() && alias) {
      for (size_t k = 0; k < args.size(); ++k)
        if (args[k].isTensor() && inputs[k].alias_info() && inputs[k].alias_info()->beforeSets() == alias->beforeSets()) results[i] = args[k];
    } else if (results[i].isTensor() && ours) {
      results[i] = there(results[i].toTensor());
    } else if (results[i].isTensorList() && !alias) {
      c10::List<Tensor> list;
      for (const Tensor& t : results[i].toTensorVector()) list.push_back(there(t));
      results[i] = list;
    }
    stack->push_back(std::move(results[i]));
  }
}

std::vector<Tensor> tensors_of(const std::vector<c10::IValue>& values) {
  std::vector<Tensor> found;
  for (const auto& value : values) {
    if (value.isTensor()) found.push_back(value.toTensor());
    if (value.isTensorList())
      for (const Tensor& t : value.toTensorVector()) found.push_back(t);
  }
  return found;
}

void any(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  if (!recording) return run(op, stack);
  const auto args = torch::jit::last(*stack, op.schema().arguments().size()).vec();
  const auto outputs = op.schema().returns().size();
  run(op, stack);
  const auto first = tensors_of(torch::jit::last(*stack, outputs).vec());
  recording->push_back([op, args, first, outputs] {
    torch::jit::Stack again(args.begin(), args.end());
    at::AutoDispatchBelowAutograd below;
    run(op, &again);
    const auto found = tensors_of(torch::jit::last(again, outputs).vec());
    for (size_t i = 0; i < found.size(); ++i)
      if (found[i].defined() && found[i].numel() && found[i].data_ptr() != first[i].data_ptr()) here(first[i]).copy_(here(found[i]));
  });
}

Tensor& copy_(Tensor& self, const Tensor& source, bool non_blocking) {
  at::AutoDispatchBelowAutograd below;
  const bool crosses = self.is_cuda() != source.is_cuda();
  if (crosses && (!non_blocking || (source.is_cuda() && !self.is_pinned()))) wait_for("copy");
  if (recording) {
    for (const Tensor& t : {self, source})
      TORCH_CHECK(t.is_cuda() || (non_blocking && t.is_pinned()), "CUDA error: operation not permitted when stream is capturing (copy)");
    keep(self);
    recording->push_back([to = self, source] { here(to).copy_(here(source)); });
  }
  here(self).copy_(here(source));
  return self;
}

at::Scalar local_scalar(const Tensor& t) {
  TORCH_CHECK(!recording, "CUDA error: operation not permitted when stream is capturing (a value is read)");
  wait_for("a value is read");
  return at::_local_scalar_dense(here(t));
}

Tensor empty(IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<Device>, std::optional<bool>,
             std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(size, &memory, kKeys, c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(IntArrayRef size, IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                     std::optional<Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(size, stride, &memory, kKeys, c10::dtype_or_default(dtype));
}

Tensor as_strided(const Tensor& self, IntArrayRef size, IntArrayRef stride, std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, size, stride, offset);
}

Tensor& set_storage(Tensor& self, at::Storage storage, int64_t offset, IntArrayRef size, IntArrayRef stride) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(storage));
  self.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride, offset);
  return self;
}

Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

Tensor& set_all(Tensor& self, at::Storage storage) {
  int64_t elements = storage.nbytes() / self.itemsize();
  return set_storage(self, std::move(storage), 0, {elements}, {1});
}

void resize_storage(const Tensor& t, int64_t bytes) {
  auto* storage = t.storage().unsafeGetStorageImpl();
  auto fresh = memory.allocate(bytes);
  if (bytes && storage->nbytes()) std::memcpy(fresh.get(), storage->data(), std::min<size_t>(bytes, storage->nbytes()));
  storage->set_data_ptr_noswap(std::move(fresh));
  storage->set_nbytes(bytes);
}

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&any>()); }

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", as_strided);
  m.impl("view", [](const Tensor& self, IntArrayRef size) { return at::native::view(self, size); });
  m.impl("view.dtype", [](const Tensor& self, at::ScalarType dtype) { return at::native::view_dtype(self, dtype); });
  m.impl("_reshape_alias", [](const Tensor& self, IntArrayRef size, IntArrayRef) { return at::native::view(self, size); });
  m.impl("unfold", [](const Tensor& self, int64_t dim, int64_t size, int64_t step) { return at::native::unfold(self, dim, size, step); });
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_.source_Storage", set_all);
  m.impl("resize_", resize_);
  m.impl("record_stream", [](Tensor&, Stream) {});
  m.impl("copy_", copy_);
  m.impl("_local_scalar_dense", local_scalar);
}
}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  c10::SetAllocator(DeviceType::CUDA, &memory, 100);
  m.def("held", [] {
    std::lock_guard<std::mutex> guard(lock);
    return std::make_tuple(held, peak, count);
  });
  m.def("forget_peak", [] {
    std::lock_guard<std::mutex> guard(lock);
    peak = held;
  });
  m.def("here", &here);
  m.def("resize_storage", &resize_storage);
  m.def("generator", [] { return at::Generator(standard()); });
  m.def("waits", [] { return waits; });
  m.def("wait_for", &wait_for);
  m.def("refuse_waits", [](int to) { mode = to; });
  m.def("be_quiet", [](int more) { quiet += more; });
  m.def("record", &record);
  m.def("end", &end);
  m.def("is_recording", [] { return recording != nullptr; });
  // What Python does itself, outside of torch's operations: it is done now, and again whenever the graph is repeated.
  m.def("do_and_record", [](py::function work) {
    Steps* graph = std::exchange(recording, nullptr);
    try {
      work();
    } catch (...) {
      recording = graph;
      throw;
    }
    recording = graph;
    graph->push_back([work] {
      py::gil_scoped_acquire gil;
      work();
    });
  });
  m.def("replay", [](int64_t graph) {
    for (auto& step : *reinterpret_cast<Steps*>(graph)) step();
  });
  m.def("forget", [](int64_t graph) { delete reinterpret_cast<Steps*>(graph); });
}
