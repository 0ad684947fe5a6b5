/* A streaming completions server that costs next to nothing, and a client that floods it.
 *
 *   mock serve [--ttft-us N] [--itl-us N] [--prompt-tokens N] [--together]
 *       Listens on a free port of 127.0.0.1 and prints it. One thread, epoll, prepared bytes. Every chunk is a send
 *       of its own: without times, one chunk goes out on every active connection in turn, as from an engine's steps;
 *       --together sends each answer whole. Knows POST /v1/completions and /v1/chat/completions, GET /v1/models,
 *       /health and /times: what it saw since the last time it was asked, as doubles: peak in flight, then for each
 *       request the prompt's first token (-1: text), the time received, the server's CPU seconds by then, the
 *       number of tokens n and n send times. Any other route is 404.
 *   mock flood PORT CONCURRENCY REQUESTS PROMPT_TOKENS OUTPUT_TOKENS
 *       Sends one prepared request over and over and prints requests per second: the server's ceiling.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { MAX_FD = 16384, READ_SIZE = 1 << 16, MAX_EVENTS = 1024 };

typedef struct {
    char *in;  /* bytes of the request so far */
    size_t have, room;
    int active, chat, usage, sent, wanted; /* of the answer under way */
    double due;
    size_t record; /* where its send times go */
    int heap_at;
} Conn;

static Conn *conns[MAX_FD];
static int heap[MAX_FD], heap_size; /* active connections by due time */
static int in_flight, peak;
static double *records;
static size_t records_len, records_room;
static double ttft_s, itl_s;
static int prompt_tokens = 512, together, timed;
static char chunk[2][2][512], head[256]; /* chunk[chat][last] */
static size_t chunk_len[2][2], head_len;

static double now_s(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec * 1e-9;
}

static double cpu_s(void) {
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return t.tv_sec + t.tv_nsec * 1e-9;
}

static void *grown(void *p, size_t *room, size_t need, size_t size) {
    if (need <= *room) return p;
    while (*room < need) *room = *room ? *room * 2 : 4096;
    return realloc(p, *room * size);
}

static void record(double value) {
    records = grown(records, &records_room, records_len + 1, sizeof(double));
    records[records_len++] = value;
}

static void place(int at, int fd) {
    heap[at] = fd;
    conns[fd]->heap_at = at;
}

static void sift(int at) {
    int fd = heap[at];
    while (at && conns[heap[(at - 1) / 2]]->due > conns[fd]->due) place(at, heap[(at - 1) / 2]), at = (at - 1) / 2;
    for (int child; (child = 2 * at + 1) < heap_size; at = child) {
        if (child + 1 < heap_size && conns[heap[child + 1]]->due < conns[heap[child]]->due) child++;
        if (conns[heap[child]]->due >= conns[fd]->due) break;
        place(at, heap[child]);
    }
    place(at, fd);
}

static void remove_active(int fd) {
    int at = conns[fd]->heap_at;
    conns[fd]->active = 0;
    in_flight--;
    if (at != --heap_size) {
        place(at, heap[heap_size]);
        sift(at);
    }
}

static void drop(int fd) {
    if (conns[fd]->active) remove_active(fd);
    free(conns[fd]->in);
    free(conns[fd]);
    conns[fd] = NULL;
    close(fd);
}

static size_t framed(char *out, const char *data) { return sprintf(out, "%zx\r\n%s\r\n", strlen(data), data); }

static void prepare(void) {
    for (int last = 0; last < 2; last++) {
        const char *finish = last ? "\"length\"" : "null";
        char data[400];
        sprintf(data,
                "data: {\"id\":\"cmpl-0123456789abcdef0123456789abcdef\",\"object\":\"text_completion\",\"created\":"
                "1700000000,\"model\":\"mock\",\"choices\":[{\"index\":0,\"text\":\" token\",\"logprobs\":null,"
                "\"finish_reason\":%s,\"stop_reason\":null}]}\n\n",
                finish);
        chunk_len[0][last] = framed(chunk[0][last], data);
        sprintf(data,
                "data: {\"id\":\"chatcmpl-0123456789abcdef0123456789abcdef\",\"object\":\"chat.completion.chunk\","
                "\"created\":1700000000,\"model\":\"mock\",\"choices\":[{\"index\":0,\"delta\":{\"content\":\" token\"},"
                "\"logprobs\":null,\"finish_reason\":%s}]}\n\n",
                finish);
        chunk_len[1][last] = framed(chunk[1][last], data);
    }
    head_len = sprintf(head,
                       "HTTP/1.1 200 OK\r\nserver: mock\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
                       "transfer-encoding: chunked\r\n\r\n");
}

/* Appends the answer's next chunk, with the head before the first and all that ends it after the last. */
static size_t next_chunk(Conn *c, char *out) {
    size_t n = 0;
    int last = c->sent + 1 == c->wanted;
    if (!c->sent) memcpy(out, head, n = head_len);
    memcpy(out + n, chunk[c->chat][last], chunk_len[c->chat][last]);
    n += chunk_len[c->chat][last];
    c->sent++;
    if (!last) return n;
    if (c->usage) {
        char data[400];
        sprintf(data,
                "data: {\"id\":\"cmpl-0123456789abcdef0123456789abcdef\",\"object\":\"%s\",\"created\":1700000000,"
                "\"model\":\"mock\",\"choices\":[],\"usage\":{\"prompt_tokens\":%d,\"total_tokens\":%d,"
                "\"completion_tokens\":%d}}\n\n",
                c->chat ? "chat.completion.chunk" : "text_completion", prompt_tokens, prompt_tokens + c->wanted,
                c->wanted);
        n += framed(out + n, data);
    }
    n += framed(out + n, "data: [DONE]\n\n");
    memcpy(out + n, "0\r\n\r\n", 5);
    return n + 5;
}

static void write_all(int fd, const char *data, size_t n) {
    while (n) {
        ssize_t k = send(fd, data, n, MSG_NOSIGNAL);
        if (k < 0 && (errno == EAGAIN || errno == EINTR)) continue;
        if (k < 0) return; /* the reader will see it */
        data += k;
        n -= k;
    }
}

static void plain(int fd, const char *status, const char *kind, const void *body, size_t n) {
    char out[256];
    int k = sprintf(out, "HTTP/1.1 %s\r\ncontent-type: %s\r\ncontent-length: %zu\r\n\r\n", status, kind, n);
    write_all(fd, out, k);
    write_all(fd, body, n);
}

static void step(int fd) {
    static char out[1 << 20];
    Conn *c = conns[fd];
    size_t n = 0;
    double now = now_s();
    do {
        records[c->record + 4 + c->sent] = now;
        n += next_chunk(c, out + n);
    } while (together && c->sent < c->wanted && n < sizeof out - 2048);
    write_all(fd, out, n);
    if (c->sent == c->wanted) {
        remove_active(fd);
    } else {
        /* One schedule for an answer; without times, behind all others that are active. */
        c->due = timed ? c->due + itl_s : now;
        sift(c->heap_at);
    }
}

static int number_after(const char *body, size_t n, const char *key, int missing) {
    char *at = memmem(body, n, key, strlen(key));
    return at ? atoi(at + strlen(key)) : missing;
}

static void serve(int fd, char *req, size_t head_n, char *body, size_t n) {
    Conn *c = conns[fd];
    int chat = head_n > 27 && !memcmp(req, "POST /v1/chat/completions ", 26);
    if (chat || !memcmp(req, "POST /v1/completions ", 21)) {
        char *first = memmem(body, n, "\"prompt\":", 9);
        c->chat = chat;
        c->wanted = number_after(body, n, "\"max_tokens\":", number_after(body, n, "\"max_completion_tokens\":", 16));
        c->usage = memmem(body, n, "include_usage", 13) != NULL;
        c->sent = 0;
        if (!records_len) record(0); /* the peak's place */
        c->record = records_len;
        double received = now_s();
        record(first && first[9] == '[' ? atoi(first + 10) : -1);
        record(received);
        record(cpu_s());
        record(c->wanted);
        for (int i = 0; i < c->wanted; i++) record(0);
        c->due = received + ttft_s;
        c->active = 1;
        if (++in_flight > peak) peak = in_flight;
        place(heap_size++, fd);
        sift(c->heap_at);
    } else if (!memcmp(req, "GET /v1/models ", 15)) {
        const char *models = "{\"object\":\"list\",\"data\":[{\"id\":\"mock\",\"object\":\"model\",\"max_model_len\":131072}]}";
        plain(fd, "200 OK", "application/json", models, strlen(models));
    } else if (!memcmp(req, "GET /health ", 12)) {
        plain(fd, "200 OK", "text/plain", "", 0);
    } else if (!memcmp(req, "GET /times ", 11)) {
        if (!records_len) record(0);
        records[0] = peak;
        plain(fd, "200 OK", "application/octet-stream", records, records_len * sizeof(double));
        records_len = peak = 0;
    } else {
        plain(fd, "404 Not Found", "text/plain", "", 0);
    }
}

static void readable(int fd) {
    Conn *c = conns[fd];
    c->in = grown(c->in, &c->room, c->have + READ_SIZE + 1, 1);
    ssize_t k = recv(fd, c->in + c->have, READ_SIZE, 0);
    if (k < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (k <= 0) {
        drop(fd);
        return;
    }
    c->have += k;
    c->in[c->have] = 0;
    char *end = strstr(c->in, "\r\n\r\n");
    if (!end) return;
    size_t head_n = end + 4 - c->in;
    end[2] = 0;
    char *length = strcasestr(c->in, "\r\ncontent-length:");
    end[2] = '\r';
    size_t n = length ? strtoul(length + 17, NULL, 10) : 0;
    if (c->have < head_n + n) return;
    serve(fd, c->in, head_n, c->in + head_n, n);
    if (conns[fd]) memmove(c->in, c->in + head_n + n, c->have -= head_n + n);
}

static _Noreturn void run_server(void) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t size = sizeof address;
    int yes = 1, listener = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0), poll = epoll_create1(0);
    bind(listener, (struct sockaddr *)&address, size);
    listen(listener, 4096);
    getsockname(listener, (struct sockaddr *)&address, &size);
    printf("%d\n", ntohs(address.sin_port));
    fflush(stdout);
    epoll_ctl(poll, EPOLL_CTL_ADD, listener, &(struct epoll_event){EPOLLIN, {.fd = listener}});
    prepare();
    static struct epoll_event events[MAX_EVENTS];
    for (;;) {
        struct timespec wait = {0, 0}, *timeout = heap_size ? &wait : NULL;
        if (heap_size) {
            double left = conns[heap[0]]->due - now_s();
            if (left > 0) wait = (struct timespec){(time_t)left, (long)((left - (time_t)left) * 1e9)};
        }
        int n = epoll_pwait2(poll, events, MAX_EVENTS, timeout, NULL);
        for (int i = 0; i < n; i++) {
            int fd = events[i].data.fd;
            if (fd != listener) {
                if (conns[fd]) readable(fd);
                continue;
            }
            while ((fd = accept4(listener, NULL, NULL, SOCK_NONBLOCK)) >= 0) {
                if (fd >= MAX_FD) {
                    close(fd);
                    continue;
                }
                setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
                conns[fd] = calloc(1, sizeof(Conn));
                epoll_ctl(poll, EPOLL_CTL_ADD, fd, &(struct epoll_event){EPOLLIN, {.fd = fd}});
            }
        }
        double now = now_s();
        for (int left = heap_size; left && heap_size && conns[heap[0]]->due <= now; left--) step(heap[0]);
    }
}

static int flood(int port, int concurrency, long total, int prompt, int output) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK), .sin_port = htons(port)};
    char *body = malloc(prompt * 6 + 256), *request = malloc(prompt * 6 + 512);
    int n = sprintf(body, "{\"model\":\"mock\",\"max_tokens\":%d,\"stream_options\":{\"include_usage\":true},\"prompt\":[", output);
    for (int i = 0; i < prompt; i++) n += sprintf(body + n, "%s%d", i ? "," : "", 1000 + i);
    n += sprintf(body + n, "]}");
    int size = sprintf(request, "POST /v1/completions HTTP/1.1\r\nHost: mock\r\nContent-Length: %d\r\n\r\n%s", n, body);
    int yes = 1, poll = epoll_create1(0);
    long started = 0, ended = 0;
    double start = now_s();
    for (int i = 0; i < concurrency; i++, started++) {
        int fd = socket(AF_INET, SOCK_STREAM, 0);
        if (connect(fd, (struct sockaddr *)&address, sizeof address)) return perror("connect"), 1;
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
        epoll_ctl(poll, EPOLL_CTL_ADD, fd, &(struct epoll_event){EPOLLIN, {.fd = fd}});
        write_all(fd, request, size);
    }
    static char in[READ_SIZE];
    static struct epoll_event events[MAX_EVENTS];
    while (ended < total) {
        int k = epoll_wait(poll, events, MAX_EVENTS, -1);
        for (int i = 0; i < k; i++) {
            int fd = events[i].data.fd;
            ssize_t got = recv(fd, in, sizeof in, 0);
            if (got <= 0) return 1;
            if (got < 5 || memcmp(in + got - 5, "0\r\n\r\n", 5)) continue;
            ended++;
            if (started < total) started++, write_all(fd, request, size);
        }
    }
    printf("%.1f\n", total / (now_s() - start));
    return 0;
}

int main(int argc, char **argv) {
    signal(SIGPIPE, SIG_IGN);
    if (argc == 7 && !strcmp(argv[1], "flood"))
        return flood(atoi(argv[2]), atoi(argv[3]), atol(argv[4]), atoi(argv[5]), atoi(argv[6]));
    if (argc < 2 || strcmp(argv[1], "serve")) return fprintf(stderr, "mock serve | mock flood\n"), 2;
    for (int i = 2; i < argc; i++) {
        if (!strcmp(argv[i], "--together")) together = 1;
        else if (!strcmp(argv[i], "--ttft-us")) ttft_s = atof(argv[++i]) * 1e-6, timed = 1;
        else if (!strcmp(argv[i], "--itl-us")) itl_s = atof(argv[++i]) * 1e-6, timed = 1;
        else if (!strcmp(argv[i], "--prompt-tokens")) prompt_tokens = atoi(argv[++i]);
    }
    run_server();
}
