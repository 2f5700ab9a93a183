#include "tests/training/layer_data.h"

#include <cmath>

namespace gdn::kernels {
namespace {

Doubles Normals(Random& random, gdn_dtype dtype, int64_t size, float scale) {
  Tensor rounded(dtype, size);
  Doubles values;
  for (int64_t i = 0; i < size; ++i) {
    rounded.Set(i, scale * random.Normal());
    values.push_back(rounded.Get(i));
  }
  return values;
}

double Sigmoid(double x) { return 1.0 / (1.0 + std::exp(-x)); }

// y[m, n] = sum_k x[m, k] w[n, k]
Doubles Product(const Doubles& x, const Doubles& w, int64_t rows, int64_t n, int64_t k) {
  Doubles y;
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t j = 0; j < n; ++j) {
      double sum = 0.0;
      for (int64_t i = 0; i < k; ++i) {
        sum += x[static_cast<size_t>(row * k + i)] * w[static_cast<size_t>(j * k + i)];
      }
      y.push_back(sum);
    }
  }
  return y;
}

// x / sqrt(sum(x^2) + eps) of `size` values.
Doubles Normalised(const double* x, int64_t size) {
  double sum = LayerShape::kEps;
  for (int64_t i = 0; i < size; ++i) sum += x[i] * x[i];
  Doubles unit(x, x + size);
  for (double& value : unit) value /= std::sqrt(sum);
  return unit;
}

// One head of one token: moves the state [V][K] and returns o.
Doubles RuleStep(const Doubles& q, const Doubles& k, const double* v, double g, double beta,
                 Doubles& state) {
  Doubles o;
  const size_t keys = k.size();
  const double decay = std::exp(g);
  for (size_t row = 0; row < state.size() / keys; ++row) {
    double* const s = state.data() + row * keys;
    double predicted = 0.0;
    for (size_t i = 0; i < keys; ++i) {
      s[i] *= decay;
      predicted += s[i] * k[i];
    }
    const double u = beta * (v[row] - predicted);
    double sum = 0.0;
    for (size_t i = 0; i < keys; ++i) {
      s[i] += u * k[i];
      sum += s[i] * q[i];
    }
    o.push_back(sum / std::sqrt(static_cast<double>(keys)));
  }
  return o;
}

// q|k|v after the convolution and SiLU.
Doubles Convolved(const LayerData& d, const Doubles& projected) {
  const int64_t channels = d.shape.z();
  Doubles y;
  for (size_t sequence = 0; sequence + 1 < d.cu.size(); ++sequence) {
    for (int64_t t = d.cu[sequence]; t < d.cu[sequence + 1]; ++t) {
      for (int64_t c = 0; c < channels; ++c) {
        double p = d.conv_bias[static_cast<size_t>(c)];
        for (int64_t j = 0; j < LayerShape::kWidth; ++j) {
          const int64_t from = t - LayerShape::kWidth + 1 + j;
          if (from < d.cu[sequence]) continue;
          p += d.conv_weight[static_cast<size_t>(c * LayerShape::kWidth + j)] *
               projected[static_cast<size_t>(from * d.shape.projected() + c)];
        }
        y.push_back(p * Sigmoid(p));
      }
    }
  }
  return y;
}

}  // namespace

int64_t LayerShape::tokens() const {
  int64_t sum = 0;
  for (const int32_t length : lengths) sum += length;
  return sum;
}

LayerData::LayerData(const LayerShape& s, uint32_t seed) : shape(s) {
  Random random(seed);
  const auto scale = [](int64_t fan_in) { return 1.0f / std::sqrt(static_cast<float>(fan_in)); };
  for (const int32_t length : s.lengths) cu.push_back(cu.back() + length);
  x = Normals(random, s.dtype, s.tokens() * s.hidden, 1.0f);
  in_weight = Normals(random, s.dtype, s.projected() * s.hidden, scale(s.hidden));
  conv_weight = Normals(random, GDN_F32, s.z() * LayerShape::kWidth, 0.5f);
  conv_bias.assign(static_cast<size_t>(s.z()), 0.0);
  a_log = RandomDoubles(random, s.value_heads(), -3.0f, 0.5f);
  dt_bias = RandomDoubles(random, s.value_heads(), -1.0f, 1.0f);
  gamma = RandomDoubles(random, s.value_dim, 0.5f, 1.5f);
  out_weight = Normals(random, s.dtype, s.hidden * s.values(), scale(s.values()));
  target = Normals(random, s.dtype, s.tokens() * s.hidden, 1.0f);
}

std::vector<std::pair<std::string, Doubles*>> LayerData::Parameters() {
  return {{"x", &x},
          {"in_weight", &in_weight},
          {"conv_weight", &conv_weight},
          {"conv_bias", &conv_bias},
          {"a_log", &a_log},
          {"dt_bias", &dt_bias},
          {"gamma", &gamma},
          {"out_weight", &out_weight}};
}

double Loss(const LayerData& data, const Doubles& out) {
  double loss = 0.0;
  for (size_t i = 0; i < out.size(); ++i) loss += 0.5 * std::pow(out[i] - data.target[i], 2);
  return loss;
}

Doubles Forward64(const LayerData& d) {
  const LayerShape& s = d.shape;
  const Doubles projected = Product(d.x, d.in_weight, s.tokens(), s.projected(), s.hidden);
  const Doubles qkv = Convolved(d, projected);
  Doubles y(static_cast<size_t>(s.tokens() * s.values()));
  for (size_t sequence = 0; sequence + 1 < d.cu.size(); ++sequence) {
    for (int64_t head = 0; head < s.value_heads(); ++head) {
      Doubles state(static_cast<size_t>(s.value_dim * s.key_dim), 0.0);
      const auto h = static_cast<size_t>(head);
      for (int64_t t = d.cu[sequence]; t < d.cu[sequence + 1]; ++t) {
        const double* const from = qkv.data() + t * s.z();
        const double* const row = projected.data() + t * s.projected();
        const double* const q = from + head / s.ratio * s.key_dim;
        const double g =
            -std::exp(d.a_log[h]) * std::log1p(std::exp(row[s.a() + head] + d.dt_bias[h]));
        const Doubles o =
            RuleStep(Normalised(q, s.key_dim), Normalised(q + s.keys(), s.key_dim),
                     from + s.v() + head * s.value_dim, g, Sigmoid(row[s.b() + head]), state);
        double square = 0.0;
        for (const double value : o) square += value * value;
        const double rstd =
            1.0 / std::sqrt(square / static_cast<double>(s.value_dim) + LayerShape::kEps);
        for (int64_t i = 0; i < s.value_dim; ++i) {
          const double z = row[s.z() + head * s.value_dim + i];
          y[static_cast<size_t>(t * s.values() + head * s.value_dim + i)] =
              o[static_cast<size_t>(i)] * rstd * d.gamma[static_cast<size_t>(i)] * z * Sigmoid(z);
        }
      }
    }
  }
  return Product(y, d.out_weight, s.tokens(), s.hidden, s.values());
}

}  // namespace gdn::kernels
