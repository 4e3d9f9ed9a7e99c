// SPDX-License-Identifier: Apache-2.0
// The part of DLPack 1.x that reads a Python tensor in place: its struct, and the table of functions that a tensor type
// offers as `__dlpack_c_exchange_api__`. Layouts are those of the DLPack specification (github.com/dmlc/dlpack).
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>

namespace unirl::dlpack {

struct Device {
  int32_t type;
  int32_t id;
};

struct DataType {
  uint8_t code;
  uint8_t bits;
  uint16_t lanes;
};

// Strides and sizes count elements; the producer owns both arrays.
struct Tensor {
  void* data;
  Device device;
  int32_t num_axes;
  DataType dtype;
  int64_t* shape;
  int64_t* strides;
  uint64_t byte_offset;
};

struct ExchangeTable {
  struct {
    uint32_t major;
    uint32_t minor;
  } version;
  ExchangeTable* older;
  void* allocate;
  void* export_owned;
  void* import_owned;
  int (*read)(void* tensor, Tensor* out);  // non-zero: a Python error is set
  void* current_stream;
};

// Reads tensors of one framework, while the GIL is held.
class Reader {
 public:
  explicit Reader(const pybind11::type& type) : type_(reinterpret_cast<PyTypeObject*>(type.ptr())) {
    const pybind11::object capsule = type.attr("__dlpack_c_exchange_api__");
    const auto* table = static_cast<ExchangeTable*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
    if (table == nullptr) throw pybind11::error_already_set();
    if (table->version.major != 1 || table->read == nullptr) {
      throw std::runtime_error("this tensor type offers no reading in place by DLPack 1");
    }
    read_ = table->read;
  }

  // What `tensor`, known to be one, is; valid while it lives and keeps its sizes.
  Tensor operator()(pybind11::handle tensor) const {
    Tensor result;
    if (read_(tensor.ptr(), &result) != 0) throw pybind11::error_already_set();
    return result;
  }

  // The same, but false for what is not of the reader's type, or has no memory to read.
  bool can_read(pybind11::handle tensor, Tensor& result) const {
    if (!PyObject_TypeCheck(tensor.ptr(), type_)) return false;
    if (read_(tensor.ptr(), &result) == 0) return true;
    PyErr_Clear();
    return false;
  }

 private:
  PyTypeObject* type_;
  int (*read_)(void*, Tensor*);
};

}  // namespace unirl::dlpack
