// Recurrent cells and nn.LSTM from ordinary operators, the same ones in the same order as on the CPU. PyTorch itself
// would ask a PrivateUse1 device for fused kernels, whose bits differ.
#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/stack.h>
#include <torch/library.h>

#include <algorithm>
#include <tuple>
#include <utility>
#include <vector>

namespace ebbtide::device {
namespace {

using OptionalTensor = std::optional<at::Tensor>;
using Pair = std::tuple<at::Tensor, at::Tensor>;

// `projected`: the input times its weights.
Pair lstm_step(const at::Tensor& projected, const at::Tensor& hidden, const at::Tensor& cell, const at::Tensor& weight,
               const OptionalTensor& bias) {
  const auto gates = at::linear(hidden, weight, bias).add_(projected).unsafe_chunk(4, 1);
  const at::Tensor in = gates[0].sigmoid_();
  const at::Tensor forget = gates[1].sigmoid_();
  const at::Tensor update = gates[2].tanh_();
  const at::Tensor out = gates[3].sigmoid_();
  const at::Tensor next = (forget * cell).add_(in * update);
  return {out * next.tanh(), next};
}

Pair lstm_cell(const at::Tensor& input, at::TensorList hx, const at::Tensor& w_ih, const at::Tensor& w_hh,
               const OptionalTensor& b_ih, const OptionalTensor& b_hh) {
  return lstm_step(at::linear(input, w_ih, b_ih), hx[0], hx[1], w_hh, b_hh);
}

at::Tensor gru_cell(const at::Tensor& input, const at::Tensor& hidden, const at::Tensor& w_ih, const at::Tensor& w_hh,
                    const OptionalTensor& b_ih, const OptionalTensor& b_hh) {
  const auto of_input = at::linear(input, w_ih, b_ih).unsafe_chunk(3, 1);
  const auto of_hidden = at::linear(hidden, w_hh, b_hh).unsafe_chunk(3, 1);
  const at::Tensor reset = at::Tensor(of_hidden[0]).add_(of_input[0]).sigmoid_();
  const at::Tensor keep = at::Tensor(of_hidden[1]).add_(of_input[1]).sigmoid_();
  const at::Tensor update = of_input[2].add(at::Tensor(of_hidden[2]).mul_(reset)).tanh_();
  return (hidden - update).mul_(keep).add_(update);
}

// One direction of one layer over all steps.
std::tuple<at::Tensor, Pair> lstm_layer(const at::Tensor& input, Pair state, at::TensorList weights, bool backwards) {
  const bool has_biases = weights.size() == 4;
  const OptionalTensor none;
  const at::Tensor projected = at::linear(input, weights[0], has_biases ? OptionalTensor(weights[2]) : none);
  std::vector<at::Tensor> steps = projected.unbind(0);
  if (backwards) std::reverse(steps.begin(), steps.end());
  for (at::Tensor& step : steps) {
    state = lstm_step(step, std::get<0>(state), std::get<1>(state), weights[1],
                      has_biases ? OptionalTensor(weights[3]) : none);
    step = std::get<0>(state);
  }
  if (backwards) std::reverse(steps.begin(), steps.end());
  return {at::stack(steps, 0), std::move(state)};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> lstm(const at::Tensor& given, at::TensorList hx, at::TensorList params,
                                                    bool has_biases, std::int64_t layers, double dropout, bool train,
                                                    bool bidirectional, bool batch_first) {
  const std::int64_t directions = bidirectional ? 2 : 1;
  const std::size_t per_layer = has_biases ? 4 : 2;
  TORCH_CHECK(params.size() == per_layer * static_cast<std::size_t>(layers * directions),
              "tide has no LSTM with projections");
  at::Tensor input = batch_first ? given.transpose(0, 1) : given;
  const auto hidden = hx[0].unbind(0);
  const auto cell = hx[1].unbind(0);
  std::vector<at::Tensor> last_hidden;
  std::vector<at::Tensor> last_cell;
  for (std::int64_t layer = 0; layer < layers; ++layer) {
    std::vector<at::Tensor> outputs;
    for (std::int64_t direction = 0; direction < directions; ++direction) {
      const auto at = static_cast<std::size_t>(layer * directions + direction);
      auto [output, state] =
          lstm_layer(input, {hidden[at], cell[at]}, params.slice(at * per_layer, per_layer), direction == 1);
      outputs.push_back(std::move(output));
      last_hidden.push_back(std::get<0>(state));
      last_cell.push_back(std::get<1>(state));
    }
    input = bidirectional ? at::cat(outputs, -1) : outputs[0];
    if (dropout != 0 && train && layer + 1 < layers) input = at::dropout(input, dropout, true);
  }
  return {batch_first ? input.transpose(0, 1) : input, at::stack(last_hidden, 0), at::stack(last_cell, 0)};
}

void add(torch::Library& library) {
  library.impl("lstm_cell", &lstm_cell);
  library.impl("gru_cell", &gru_cell);
  library.impl("lstm.input", &lstm);
}

// Composite: differentiable because what they are made of is.
TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, library) { add(library); }
TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) { add(library); }

}  // namespace
}  // namespace ebbtide::device
