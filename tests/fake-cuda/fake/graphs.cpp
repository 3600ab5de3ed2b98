// libcuda: stream capture and graphs. A graph's nodes run in a random order that respects their edges only.
#include <algorithm>

#include "engine.h"

using namespace fake;

FAKE_API int cuStreamBeginCapture_v2(void* handle, int mode) {
    ENTER();
    int error;
    Stream* stream = stream_of(handle, &error);
    if (!stream) return error;
    if (mode < 0 || mode > 2) return INVALID_VALUE;
    if (stream->is_null) return CAPTURE_UNSUPPORTED;
    if (stream->capture) return 401;  // CUDA_ERROR_ILLEGAL_STATE
    auto capture = std::make_shared<Capture>();
    capture->origin = stream;
    capture->mode = mode;
    capture->thread = this_thread();
    capture->streams.insert(stream);
    stream->capture = capture;
    stream->captured_last.clear();
    world().captures.insert(capture.get());
    return OK;
}

// Whether all that was captured leads to these nodes: no stream was left without joining the first one again.
static bool joined(const Graph& graph, const std::vector<int>& last) {
    std::vector<bool> reached(graph.nodes.size(), false);
    std::vector<int> stack = last;
    while (!stack.empty()) {
        const int i = stack.back();
        stack.pop_back();
        if (reached[i]) continue;
        reached[i] = true;
        stack.insert(stack.end(), graph.nodes[i].needs.begin(), graph.nodes[i].needs.end());
    }
    return std::find(reached.begin(), reached.end(), false) == reached.end();
}

FAKE_API int cuStreamEndCapture(void* handle, std::shared_ptr<Graph>** out) {
    ENTER();
    int error;
    Stream* stream = stream_of(handle, &error);
    if (!stream) return error;
    if (!stream->capture) return 401;  // CUDA_ERROR_ILLEGAL_STATE
    if (out) *out = nullptr;
    const auto capture = stream->capture;
    if (capture->origin != stream) {
        capture->invalid = true;
        return CAPTURE_UNMATCHED;
    }
    if (capture->mode != 2 && capture->thread != this_thread()) return CAPTURE_WRONG_THREAD;
    const bool all_joined = joined(*capture->graph, stream->captured_last);
    for (Stream* one : capture->streams) one->capture.reset(), one->captured_last.clear();
    world().captures.erase(capture.get());
    if (capture->invalid) return CAPTURE_INVALIDATED;
    if (!all_joined) return CAPTURE_UNJOINED;
    if (out) *out = new std::shared_ptr<Graph>(capture->graph);
    return OK;
}

FAKE_API int cuStreamIsCapturing(void* handle, int* status) {
    ENTER();
    int error;
    Stream* stream = stream_of(handle, &error);
    if (!stream) return error;
    *status = !stream->capture ? 0 : stream->capture->invalid ? 2 : 1;
    return OK;
}

FAKE_API int cuGraphInstantiateWithFlags(GraphExec** out, std::shared_ptr<Graph>* graph, unsigned long long) {
    ENTER();
    if (!out || !graph) return INVALID_VALUE;
    GraphExec* exec = new GraphExec();
    exec->nodes = (*graph)->nodes;
    *out = exec;
    return OK;
}

FAKE_API int cuGraphGetNodes(std::shared_ptr<Graph>* graph, void**, size_t* count) {
    ENTER();
    if (!graph || !count) return INVALID_VALUE;
    *count = (*graph)->nodes.size();
    return OK;
}

FAKE_API int cuGraphLaunch(GraphExec* exec, void* handle) {
    ENTER();
    int error;
    Stream* stream = stream_of(handle, &error);
    if (!stream) return error;
    if (!exec) return INVALID_VALUE;
    if (stream->capture) return NOT_SUPPORTED;
    return launch_graph(exec, stream);
}

FAKE_API int cuGraphUpload(GraphExec* exec, void* handle) {
    ENTER();
    int error;
    if (!stream_of(handle, &error)) return error;
    return exec ? OK : INVALID_VALUE;
}

FAKE_API int cuGraphExecDestroy(GraphExec* exec) {
    ENTER();
    if (!exec) return INVALID_VALUE;
    delete exec;  // the operations of its launches have what they need
    return OK;
}

FAKE_API int cuGraphDestroy(std::shared_ptr<Graph>* graph) {
    ENTER();
    if (!graph) return INVALID_VALUE;
    delete graph;
    return OK;
}
