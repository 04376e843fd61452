// A client of a schema registry, with franz-go's package sr. Prints its answers as JSON.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"

	"github.com/twmb/franz-go/pkg/sr"
)

const (
	money = `{"type":"record","name":"Money","fields":[{"name":"cents","type":"long"}]}`
	order = `{"type":"record","name":"Order","fields":[{"name":"price","type":"Money"}]}`
	wider = `{"type":"record","name":"Order","fields":[{"name":"price","type":"Money"},{"name":"note","type":"string"}]}`
)

func must[T any](value T, err error) T {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	return value
}

func code(err error) int {
	var failure *sr.ResponseError
	if errors.As(err, &failure) {
		return failure.ErrorCode
	}
	return 0
}

func main() {
	ctx := context.Background()
	client := must(sr.NewClient(sr.URLs(os.Args[1])))
	answers := map[string]any{}

	answers["types"] = must(client.SupportedTypes(ctx))
	base := must(client.CreateSchema(ctx, "franz/money", sr.Schema{Schema: money}))
	references := []sr.SchemaReference{{Name: "Money", Subject: base.Subject, Version: base.Version}}
	made := must(client.CreateSchema(ctx, "franz-value", sr.Schema{Schema: order, References: references}))
	answers["ids"] = []int{base.ID, made.ID}
	answers["version"] = made.Version
	answers["same"] = must(client.LookupSchema(ctx, "franz-value", sr.Schema{Schema: order, References: references})).ID
	answers["text"] = must(client.SchemaByID(ctx, made.ID)).Schema
	answers["users"] = len(must(client.SchemaReferences(ctx, base.Subject, base.Version)))
	verdict := must(client.CheckCompatibility(ctx, "franz-value", -1, sr.Schema{Schema: wider, References: references}))
	answers["compatible"] = verdict.Is
	_, err := client.CreateSchema(ctx, "franz-value", sr.Schema{Schema: wider, References: references})
	answers["refused"] = code(err)
	for _, one := range client.SetCompatibility(ctx, sr.SetCompatibility{Level: sr.CompatForward}, "franz-value") {
		answers["level"] = one.Level.String()
	}
	for _, one := range client.Compatibility(ctx, "franz-value") {
		answers["stored level"] = one.Level.String()
	}
	answers["second"] = must(client.CreateSchema(ctx, "franz-value", sr.Schema{Schema: wider, References: references})).Version
	answers["subjects"] = must(client.Subjects(ctx))
	_, err = client.SchemaByID(ctx, 9999)
	answers["unknown"] = code(err)
	json := must(client.CreateSchema(ctx, "franz-json", sr.Schema{Schema: `{"type":"object"}`, Type: sr.TypeJSON}))
	answers["json"] = json.Type.String()

	var serde sr.Serde
	serde.Register(made.ID, map[string]any{}, sr.EncodeFn(func(value any) ([]byte, error) {
		// An Avro long: zig-zag, one byte.
		return []byte{byte(value.(map[string]any)["cents"].(int) << 1)}, nil
	}))
	answers["encoded"] = must(serde.Encode(map[string]any{"cents": 21}))

	answers["deleted"] = must(client.DeleteSubject(ctx, "franz-value", sr.SoftDelete))
	answers["deleted for good"] = must(client.DeleteSubject(ctx, "franz-value", sr.HardDelete))
	print_(answers)
}

func print_(answers map[string]any) {
	must(1, json.NewEncoder(os.Stdout).Encode(answers))
}
