/* A port inside that the host serves: the listening socket is made here, in this network, and its descriptor goes out
   with the answer. Nothing of it stays here, where a program could reach it. */
#include "sandbox.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

enum { BACKLOG = 64 };
static const char NO_SOCKET[] = "this back end reaches the sandbox through a pipe, which carries no socket: use the "
                                "namespaces or the bubblewrap back end";

/* Sends D with the port's number and the descriptor. */
static int send_socket(uint32_t id, uint16_t port, int fd) {
  char frame[11];
  uint32_t size = sizeof port;
  memcpy(frame, &size, 4);
  frame[4] = 'D';
  memcpy(frame + 5, &id, 4);
  memcpy(frame + 9, &port, 2);
  struct iovec part = {frame, sizeof frame};
  union {
    struct cmsghdr align;
    char bytes[CMSG_SPACE(sizeof(int))];
  } space;
  struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = &space, .msg_controllen = sizeof space};
  struct cmsghdr *header = CMSG_FIRSTHDR(&message);
  header->cmsg_level = SOL_SOCKET, header->cmsg_type = SCM_RIGHTS, header->cmsg_len = CMSG_LEN(sizeof(int));
  memcpy(CMSG_DATA(header), &fd, sizeof fd);
  ssize_t sent;
  while ((sent = sendmsg(control_out, &message, MSG_NOSIGNAL)) < 0 && errno == EINTR) {
  }
  if (sent >= 0 && sent < (ssize_t)sizeof frame) _exit(0); /* half an answer: the host cannot go on */
  return sent < 0 ? -1 : 0;
}

void port_open(struct frame *request) { /* u16 port, 0 = any free one */
  struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr = {htonl(INADDR_LOOPBACK)}};
  socklen_t size = sizeof address;
  uint16_t port;
  if (request->size != sizeof port) {
    write_error(request->id, EINVAL, "a port's number is wanted");
    return;
  }
  memcpy(&port, request->data, sizeof port);
  address.sin_port = htons(port);
  /* Without SO_REUSEADDR and SO_REUSEPORT: no program of the agent's can listen at the same place. */
  int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (fd < 0 || bind(fd, (struct sockaddr *)&address, size) || listen(fd, BACKLOG) ||
      getsockname(fd, (struct sockaddr *)&address, &size)) {
    write_error(request->id, errno, "cannot listen inside");
  } else if (send_socket(request->id, ntohs(address.sin_port), fd)) {
    int pipe = errno == ENOTSOCK;
    write_error(request->id, pipe ? 0 : errno, pipe ? NO_SOCKET : "cannot send the socket out");
  }
  if (fd >= 0) close(fd);
}
