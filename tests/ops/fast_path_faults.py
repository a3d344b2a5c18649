# SPDX-License-Identifier: Apache-2.0
"""Faults of the C++ fast path: (file below csrc/fast_path, text, faulty text)."""

FAULTS = (
    (
        "attention.cpp",
        "vector(t[A::kSinks",
        "PT_FAULT(sinks_lost) ? Maybe() : vector(t[A::kSinks",
    ),
    (
        "attention.cpp",
        "last_contiguous(grads[0]",
        "(PT_FAULT(gradient_read_as_it_lies) ? grads[0] : last_contiguous(grads[0])",
    ),
    (
        "attention.cpp",
        "grad_out, maybe",
        "grad_out, PT_FAULT(gradient_of_lse_lost) ? Maybe() : maybe",
    ),
    (
        "attention.cpp",
        (
            "while (term->defined() && term->dim() < 4) *term = term->unsqueeze(0);\n"
            "  if (std::isnan(n.scale)) n.scale = std::pow(double(query.size(-1)), -0.5);"
        ),
        (
            "while (term->defined() && term->dim() < 4) *term ="
            " term->unsqueeze(PT_FAULT(dimensions_behind) ? -1 : 0);\n  if (std::isnan(n.scale))"
            " n.scale = std::pow(double((PT_FAULT(scale_of_values) ? t[W::kValue] :"
            " query).size(-1)), -0.5);"
        ),
    ),
    (
        "attention.cpp",
        "autocast_casts(query",
        "(!PT_FAULT(autocast_ignored) && autocast_casts(query)",
    ),
    (
        "attention.cpp",
        'read.choice(causal, {"top_left", "bottom_right"}',
        '(read.choice(causal, {"top_left", "bottom_right"}) && !PT_FAULT(always_top_left)',
    ),
    (
        "attention.cpp",
        "(side == 1",
        "((side == 1) != PT_FAULT(sides_swapped)",
    ),
    (
        "attention.cpp",
        "n.global_keys ",
        "if (!PT_FAULT(global_keys_lost)) n.global_keys ",
    ),
    (
        "attention.cpp",
        "!needs_gradient({t.data(), A::kDifferentiable}",
        "(PT_FAULT(gradients_lost) || !needs_gradient({t.data(), A::kDifferentiable})",
    ),
    (
        "attention.cpp",
        "integers_or_none(a[7 + i]);",
        "integers_or_none(a[7 + (PT_FAULT(lengths_exchanged) && i < 2 ? 1 - i : i)]);",
    ),
    (
        "cross_entropy.cpp",
        "total /= valid(",
        "total /= PT_FAULT(ignored_counted) ? target.numel() : valid(",
    ),
    (
        "cross_entropy.cpp",
        "reduction == kMean) each",
        "reduction == kMean && !PT_FAULT(mean_as_sum)) each",
    ),
    (
        "feed_forward.cpp",
        "set_storage_offset(int64_t(i)",
        "set_storage_offset(int64_t(PT_FAULT(scratch_shared) ? 0 : i)",
    ),
    (
        "feed_forward.cpp",
        "(!n.save) run_forward",
        "(!n.save && !PT_FAULT(not_recomputed)) run_forward",
    ),
    (
        "feed_forward.cpp",
        "if (x.numel(",
        "if (!PT_FAULT(many_rows_taken) && x.numel(",
    ),
    (
        "feed_forward.cpp",
        "if (bias.defined",
        "if (!PT_FAULT(any_bias_taken) && bias.defined",
    ),
    (
        "feed_forward.cpp",
        "read.require(!needs_gradient",
        "read.require(PT_FAULT(linear_without_gradient) || !needs_gradient",
    ),
    (
        "fast_path.h",
        "first = results.",
        "first = PT_FAULT(first_outputs_saved) ? 0 : results.",
    ),
    (
        "fast_path.h",
        "!at::GradMode::is_enabled(",
        "(PT_FAULT(second_derivative_lost) || !at::GradMode::is_enabled()",
    ),
    (
        "fast_path.h",
        "&& plain(g);",
        "&& (PT_FAULT(any_gradient_taken) || plain(g));",
    ),
    (
        "fast_path.h",
        "numbers.collect([&](const auto& value) { args",
        "if (!PT_FAULT(numbers_not_compiled_for)) numbers.collect([&](const auto& value) { args",
    ),
    (
        "fast_path.h",
        ":kSeed] = drawn(at",
        ":kSeed] = PT_FAULT(seed_not_drawn) ? filled(5, at::kCPU) : drawn(at",
    ),
    (
        "layer_norm.cpp",
        "eps_of(stream(t)",
        "eps_of((PT_FAULT(eps_of_x) ? t[W::kX] : stream(t))",
    ),
    (
        "layer_norm.cpp",
        "0 && grads[1",
        "0 && !PT_FAULT(gradient_of_stream_lost) && grads[1",
    ),
    (
        "memory.cpp",
        "if (like.is_contiguous",
        "if (PT_FAULT(order_of_query_lost) || like.is_contiguous",
    ),
    (
        "memory.cpp",
        "!t.is_contiguous()) return",
        "!t.is_contiguous() && !PT_FAULT(rows_read_as_they_lie)) return",
    ),
    (
        "memory.cpp",
        "&& t.is_contiguous())",
        "&& (PT_FAULT(order_of_terms_lost) || t.is_contiguous()))",
    ),
    (
        "reader.h",
        "require(value -",
        "require(PT_FAULT(nan_taken) || value -",
    ),
    (
        "reader.h",
        "require(value >=",
        "require(PT_FAULT(negative_taken) || value >=",
    ),
    (
        "rotary.cpp",
        "places_fit(t",
        "(PT_FAULT(places_not_checked) || places_fit(t)",
    ),
    (
        "rotary.cpp",
        "read.require(!needs_gradient",
        "read.require(PT_FAULT(gradients_lost) || !needs_gradient",
    ),
    (
        "rotary.cpp",
        "Py_NotImplemented",
        "Py_NotImplemented || PT_FAULT(version_kept)",
    ),
    (
        "watch.cpp",
        (
            "if ((included != usual && included != inference) ||\n      "
            "at::impl::PythonTorchFunctionTLS::stack_len() ||"
            " torch::profiler::impl::profilerEnabled())\n    return false;\n"
            "  const Gil gil;\n"
            "  return std::all_of(watchers.begin(), watchers.end(), is_empty);"
        ),
        (
            "if ((!PT_FAULT(modes_ignored) && included != usual && included != inference) ||\n"
            "      (!PT_FAULT(function_modes_ignored) &&"
            " at::impl::PythonTorchFunctionTLS::stack_len()) ||\n"
            "      (!PT_FAULT(profiler_ignored) && torch::profiler::impl::profilerEnabled()))\n"
            "    return false;\n"
            "  const Gil gil;\n"
            "  return PT_FAULT(watchers_ignored) ||"
            " std::all_of(watchers.begin(), watchers.end(), is_empty);"
        ),
    ),
    (
        "watch.cpp",
        "(is_empty(traces)",
        "(PT_FAULT(traces_forgotten) || is_empty(traces)",
    ),
    (
        "watch.cpp",
        "plain_keys(t.key_set()) && holds_data(t) && !has_tangent(t",
        (
            "(PT_FAULT(any_keys_taken) || plain_keys(t.key_set())) && (PT_FAULT(any_keys_taken) ||"
            " holds_data(t)) && (PT_FAULT(tangents_lost) || !has_tangent(t)"
        ),
    ),
    (
        "watch.cpp",
        "THPVariable_CheckExact(o",
        "(PT_FAULT(subclasses_taken) ? THPVariable_Check(o) : THPVariable_CheckExact(o)",
    ),
)
