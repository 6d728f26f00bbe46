// SPDX-License-Identifier: GPL-2.0
/*
 * Virtio ISM driver: commands.
 *
 * One command is under way at a time. Their callers may sleep.
 */
#include <linux/delay.h>
#include <linux/mm.h>
#include <linux/scatterlist.h>
#include <linux/slab.h>

#include "vism.h"

#define VISM_CONTROL_LEN	256
/* A device that is silent for longer is a failed one. */
#define VISM_COMMAND_TIMEOUT	(15 * HZ)
/* How often a command that waits looks whether the device is still there. */
#define VISM_COMMAND_LOOK	(HZ / 10)
/* "Not now" is tried again that often, after so long. */
#define VISM_AGAIN_TIMES	20
#define VISM_AGAIN_MS		5

static int vism_errno(u16 status)
{
	switch (status) {
	case VIRTIO_ISM_S_OK:
		return 0;
	case VIRTIO_ISM_S_EINVAL:
		return -EINVAL;
	case VIRTIO_ISM_S_ENOENT:
		return -ENOENT;
	case VIRTIO_ISM_S_ENOSPC:
		return -ENOSPC;
	case VIRTIO_ISM_S_ENOMEM:
		return -ENOMEM;
	case VIRTIO_ISM_S_EBUSY:
		return -EBUSY;
	case VIRTIO_ISM_S_ENODEV:
	case VIRTIO_ISM_S_EORDER:
		return -ENODEV;
	case VIRTIO_ISM_S_ENOTSUP:
		return -EOPNOTSUPP;
	case VIRTIO_ISM_S_EAGAIN:
		return -EAGAIN;
	case VIRTIO_ISM_S_ESTATE:
		return -ESTALE;
	case VIRTIO_ISM_S_E2SMALL:
		return -EMSGSIZE;
	default:
		/* EIO, and what this driver does not know. -EIO is a device that has failed. */
		return -EREMOTEIO;
	}
}

/**
 * vism_control_callback() - take replies from the control queue
 * @vq: the control queue
 *
 * Context: interrupt.
 */
void vism_control_callback(struct virtqueue *vq)
{
	struct vism *ism = vq->vdev->priv;
	struct vism_control *control = &ism->control;
	unsigned long flags;
	u32 len;

	spin_lock_irqsave(&control->lock, flags);
	while (control->vq && virtqueue_get_buf(vq, &len)) {
		control->reply_len = len;
		complete(&control->done);
	}
	spin_unlock_irqrestore(&control->lock, flags);
}

/* Waits for the reply. The buffers stay the device's if there is none. */
static int vism_await_reply(struct vism *ism)
{
	unsigned long end = jiffies + VISM_COMMAND_TIMEOUT;
	struct vism_control *control = &ism->control;

	while (!wait_for_completion_timeout(&control->done,
					    VISM_COMMAND_LOOK)) {
		if (virtqueue_is_broken(control->vq)) {
			vism_fail(ism, "control queue broken");
			return -EIO;
		}
		if (READ_ONCE(ism->failed))
			return -EIO;
		if (time_after(jiffies, end)) {
			vism_fail(ism, "no reply to a command");
			return -ETIMEDOUT;
		}
	}
	return 0;
}

/* Judges the reply. The device could change its buffer at any time, so a copy is judged. */
static int vism_judge_reply(struct vism *ism, void *body, size_t body_len)
{
	struct vism_control *control = &ism->control;
	struct virtio_ism_reply reply;
	size_t len = control->reply_len;

	memcpy(&reply, control->reply, sizeof(reply));
	if (len < sizeof(reply) || len > sizeof(reply) + body_len) {
		vism_fail(ism, "reply of a wrong length");
		return -EPROTO;
	}
	if (le32_to_cpu(reply.tag) != control->tag) {
		vism_fail(ism, "reply to another command");
		return -EPROTO;
	}
	if (reply.status) {
		control->refused++;
		return vism_errno(le16_to_cpu(reply.status));
	}
	if (len != sizeof(reply) + body_len) {
		vism_fail(ism, "reply of a wrong length");
		return -EPROTO;
	}
	if (body_len)
		memcpy(body, control->reply + sizeof(reply), body_len);
	return 0;
}

static int vism_command_once(struct vism *ism, u16 op, const void *body,
			     size_t len, void *reply, size_t reply_len)
{
	struct scatterlist out, in, *sgs[2] = { &out, &in };
	struct vism_control *control = &ism->control;
	struct virtio_ism_request *request;
	unsigned long flags;
	int rc;

	guard(mutex)(&control->mutex);
	if (!vism_usable(ism))
		return -EIO;
	request = control->request;
	request->op = cpu_to_le16(op);
	request->reserved = 0;
	request->tag = cpu_to_le32(++control->tag);
	if (len)
		memcpy(request + 1, body, len);
	memset(control->reply, 0, sizeof(struct virtio_ism_reply) + reply_len);
	sg_init_one(&out, request, sizeof(*request) + len);
	sg_init_one(&in, control->reply,
		    sizeof(struct virtio_ism_reply) + reply_len);
	reinit_completion(&control->done);

	spin_lock_irqsave(&control->lock, flags);
	rc = virtqueue_add_sgs(control->vq, sgs, 1, 1, control, GFP_ATOMIC);
	if (!rc)
		virtqueue_kick(control->vq);
	spin_unlock_irqrestore(&control->lock, flags);
	if (rc) {
		vism_fail(ism, "control queue broken");
		return -EIO;
	}
	control->commands++;
	rc = vism_await_reply(ism);
	if (rc)
		return rc;
	return vism_judge_reply(ism, reply, reply_len);
}

/**
 * vism_command() - carry out a command
 * @ism: device
 * @op: VIRTIO_ISM_OP_*
 * @body: of the request
 * @len: length of @body
 * @reply: body of the reply, filled only on success
 * @reply_len: length of @reply
 *
 * Context: process; sleeps.
 * Return: 0, the device's status as error number, or -EIO, -ETIMEDOUT and -EPROTO for a device that
 * has failed. Only 0, -ENOENT and -ESTALE tell that the device has finished with what was named.
 */
int vism_command(struct vism *ism, u16 op, const void *body, size_t len,
		 void *reply, size_t reply_len)
{
	int tries = VISM_AGAIN_TIMES;
	int rc;

	might_sleep();
	if (WARN_ON_ONCE(len + sizeof(struct virtio_ism_request) > VISM_CONTROL_LEN ||
			 reply_len + sizeof(struct virtio_ism_reply) > VISM_CONTROL_LEN))
		return -EINVAL;
	for (;;) {
		rc = vism_command_once(ism, op, body, len, reply, reply_len);
		if (rc != -EAGAIN || !tries--)
			return rc;
		fsleep(VISM_AGAIN_MS * USEC_PER_MSEC);
	}
}

/**
 * vism_hello() - begin a session
 * @ism: device
 *
 * Return: 0 or an error number.
 */
int vism_hello(struct vism *ism)
{
	struct virtio_ism_hello hello = {
		.abi = cpu_to_le16(VIRTIO_ISM_REVISION),
#ifdef __BIG_ENDIAN
		.flags = cpu_to_le16(VIRTIO_ISM_HELLO_BIG_ENDIAN),
#endif
		.driver_max_idx = cpu_to_le32(ism->limits.max_dmbs),
	};
	struct virtio_ism_hello_reply reply;
	int rc;

	rc = vism_command(ism, VIRTIO_ISM_OP_HELLO, &hello, sizeof(hello),
			  &reply, sizeof(reply));
	if (rc)
		return rc;
	/* SMC takes a GID whose first half is zero for nobody's. */
	if (!memchr_inv(reply.gid, 0, VIRTIO_ISM_GID_LEN / 2)) {
		vism_fail(ism, "no GID");
		return -EPROTO;
	}
	import_uuid(&ism->gid, reply.gid);
	return 0;
}

/**
 * vism_query_gid() - ask whether a device is on this fabric
 * @ism: device
 * @gid: of the other one
 *
 * Return: 0 if it is, or an error number.
 */
int vism_query_gid(struct vism *ism, const uuid_t *gid)
{
	struct virtio_ism_query_gid_reply reply;
	struct virtio_ism_query_gid query = {};
	int rc;

	export_uuid(query.gid, gid);
	rc = vism_command(ism, VIRTIO_ISM_OP_QUERY_GID, &query, sizeof(query),
			  &reply, sizeof(reply));
	if (rc)
		return rc;
	if (!(le32_to_cpu(reply.flags) & VIRTIO_ISM_GID_REACHABLE))
		return -ENETUNREACH;
	return 0;
}

/**
 * vism_register() - register a DMB in guest memory
 * @ism: device
 * @dmb: its folio, user and index; the token is filled in
 *
 * Return: 0 or an error number. Unless that is a status of the device the memory may still become a
 * DMB.
 */
int vism_register(struct vism *ism, struct vism_dmb *dmb)
{
	struct {
		struct virtio_ism_register head;
		struct virtio_ism_sg sg;
	} request = {
		.head.idx = cpu_to_le32(dmb->idx),
		.head.len = cpu_to_le32(dmb->len),
		.head.backing = cpu_to_le16(VIRTIO_ISM_BACKING_GUEST),
		.head.nsg = cpu_to_le32(1),
		.sg.gpa = cpu_to_le64(PFN_PHYS(folio_pfn(dmb->folio))),
		.sg.len = cpu_to_le32(dmb->len),
	};
	struct virtio_ism_register_reply reply;
	int rc;

	export_uuid(request.head.user_gid, &dmb->user);
	rc = vism_command(ism, VIRTIO_ISM_OP_REGISTER, &request,
			  sizeof(request), &reply, sizeof(reply));
	if (rc)
		return rc;
	dmb->token = le64_to_cpu(reply.token);
	if (!dmb->token) {
		vism_fail(ism, "a token of zero");
		return -EPROTO;
	}
	return 0;
}

/**
 * vism_unregister() - end a DMB
 * @ism: device
 * @token: of the DMB
 *
 * Return: 0, or -ENOENT or -ESTALE if it has ended before. After other errors the device may go on
 * to write it.
 */
int vism_unregister(struct vism *ism, u64 token)
{
	struct virtio_ism_token request = { .token = cpu_to_le64(token) };

	return vism_command(ism, VIRTIO_ISM_OP_UNREGISTER, &request,
			    sizeof(request), NULL, 0);
}

/**
 * vism_signal_event() - send a software event
 * @ism: device
 * @gid: of the receiver
 * @trigger: whether it is interrupted at once
 * @code: the client's
 * @info: the client's
 *
 * Return: 0 or an error number.
 */
int vism_signal_event(struct vism *ism, const uuid_t *gid, u32 trigger,
		      u32 code, u64 info)
{
	struct virtio_ism_signal_event request = {
		.trigger = cpu_to_le32(trigger),
		.code = cpu_to_le32(code),
		.info = cpu_to_le64(info),
	};

	export_uuid(request.gid, gid);
	return vism_command(ism, VIRTIO_ISM_OP_SIGNAL_EVENT, &request,
			    sizeof(request), NULL, 0);
}

/**
 * vism_control_init() - allocate what the control queue needs
 * @ism: device
 *
 * Return: 0 or -ENOMEM.
 */
int vism_control_init(struct vism *ism)
{
	struct vism_control *control = &ism->control;

	control->request = kzalloc(VISM_CONTROL_LEN, GFP_KERNEL);
	control->reply = kzalloc(VISM_CONTROL_LEN, GFP_KERNEL);
	if (!control->request || !control->reply) {
		vism_control_exit(ism);
		return -ENOMEM;
	}
	return 0;
}

/**
 * vism_control_exit() - free what vism_control_init() has allocated
 * @ism: device, which has no virtqueues
 */
void vism_control_exit(struct vism *ism)
{
	struct vism_control *control = &ism->control;

	kfree(control->request);
	kfree(control->reply);
	control->request = NULL;
	control->reply = NULL;
}
